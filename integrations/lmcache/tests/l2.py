"""An adapter of LMCache's second level, called as LMCache calls it, and objects to store."""

from __future__ import annotations

import argparse
import json
import select
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from integrations.lmcache.tests import managers

PATIENCE = 30.0
_labels = iter(range(1 << 30))


class Adapter:
    """An adapter as LMCache makes and calls it: submit, sleep on the fd, ask once."""

    def __init__(self, url: str, **options: Any) -> None:
        options = {"timeout": 0.5, "retry_after": 0.1, **options}
        config = parse_args_to_l2_adapters_config(_arguments(managers.plugin(url, **options)))
        self.inner: Any = create_l2_adapter(config.adapters[0])

    def store(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        task = self.inner.submit_store_task(list(keys), list(objects))
        results: dict[int, Any] = {}
        fd = self.inner.get_store_event_fd()
        _wait(fd, lambda: results.update(self.inner.pop_completed_store_tasks()) or task in results)
        return results[task]

    def look_up(self, keys: Sequence[Any]) -> list[bool]:
        task = self.inner.submit_lookup_and_lock_task(list(keys), {0: managers.LAYOUT})
        fd = self.inner.get_lookup_and_lock_event_fd()
        found = self._bitmap(fd, lambda: self.inner.query_lookup_and_lock_result(task), len(keys))
        self.inner.submit_unlock(list(keys))
        return found

    def load(self, keys: Sequence[Any], objects: Sequence[Any]) -> list[bool]:
        task = self.inner.submit_load_task(list(keys), list(objects))
        fd = self.inner.get_load_event_fd()
        return self._bitmap(fd, lambda: self.inner.query_load_result(task), len(keys))

    def _bitmap(self, fd: int, ask: Callable[[], Any], count: int) -> list[bool]:
        answers: list[Any] = []

        def asked() -> bool:
            answers.append(ask())
            return answers[-1] is not None

        _wait(fd, asked)
        assert ask() is None  # once
        return [answers[-1].test(i) for i in range(count)]


def _arguments(adapter: dict[str, Any]) -> Any:
    return argparse.Namespace(l2_adapter=[json.dumps(adapter)])


def _wait(fd: int, done: Callable[[], bool]) -> None:
    """Sleep on the fd; a result without a signal, or a signal without an end, is a failure."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while True:
        assert poll.poll(PATIENCE * 1000), "a task without an end"
        consume_fd(fd)
        if done():
            return


def obj(nbytes: int = 4096, dtype: torch.dtype = torch.bfloat16, seed: int | None = None) -> Any:
    """A buffer of random bits, or of zeros."""
    generator = torch.Generator().manual_seed(seed or 0)
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    data = data if seed else torch.zeros_like(data)
    shape = torch.Size([2, 1, 4, nbytes // 8 // dtype.itemsize])
    meta = MemoryObjMetadata(
        shape,
        dtype,
        data.data_ptr(),
        nbytes,
        1,
        fmt=MemoryFormat.KV_2LTD,
        shapes=[shape],
        dtypes=[dtype],
    )
    return TensorMemoryObj(data, meta, parent_allocator=None)


def fresh(count: int) -> list[Any]:
    """Keys that nobody had before."""
    return managers.keys(count, f"test {next(_labels)}")
