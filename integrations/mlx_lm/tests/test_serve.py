"""An OpenAI client gets the same answers with less prefilled, and answers whatever Pion does.

Two server processes, which share nothing but a pion-server, on the real model.
"""

from __future__ import annotations

import itertools
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import OpenAI
from pion_vllm_mlx import PrefixStore
from pion_vllm_mlx.background import PAUSE_S
from pion_vllm_mlx.chain import BLOCK_TOKENS
from pion_vllm_mlx.processes import child, free_port, pion_server
from tiny_folder import write_folder

START_S = 120.0
MODEL = "default_model"  # the one the server was started with
SYSTEM = "You answer the guests of the lighthouse hotel. Breakfast is from seven to ten. " * 32
SHORT = SYSTEM[: len(SYSTEM) // 4]  # where it is not about how much is reused
Messages = list[dict[str, str]]


class Server:
    """A `pion-vllm-mlx serve` process and its client."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.client = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def wait_until_it_listens(self) -> None:
        give_up = time.monotonic() + START_S
        while not self.healthy():
            assert self.process.poll() is None
            assert time.monotonic() < give_up
            time.sleep(0.1)

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, ConnectionError):
            return False

    def ask(self, messages: Messages, tokens: int = 8, **options: Any) -> Any:
        return self.client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=tokens, temperature=0, **options  # type: ignore[arg-type]
        )  # fmt: skip


@contextmanager
def serving(folder: str, *options: str) -> Iterator[Server]:
    port = free_port()
    arguments = ("--model", folder, "--port", str(port), "--log-level", "WARNING", *options)
    with child("pion_vllm_mlx.cli", "serve", *arguments) as process:
        server = Server(process, port)
        server.wait_until_it_listens()
        yield server


def chat(system: str, *turns: str) -> Messages:
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
    return [{"role": "system", "content": system}, *messages]


def cached(reply: Any) -> int:
    return int(reply.usage.prompt_tokens_details.cached_tokens)


def text(reply: Any) -> str:
    return str(reply.choices[0].message.content)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with pion_server() as port:
        yield f"pion://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def servers(smollm2: Any, url: str) -> Iterator[tuple[Server, Server]]:
    """Two servers of the same model."""
    with ExitStack() as stack:
        pair = [stack.enter_context(serving(smollm2.folder, "--pion-url", url)) for _ in range(2)]
        yield pair[0], pair[1]


@pytest.fixture
def stored(smollm2: Any, url: str) -> Iterator[Callable[[Messages], None]]:
    """Wait until all whole blocks of a prompt are in Pion: storing is behind the request."""
    with PrefixStore(smollm2.model, url, timeout=30) as store:

        def wait(messages: Messages) -> None:
            ids = smollm2.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            give_up = time.monotonic() + START_S
            while store.match(ids).length < len(ids) // 256 * 256:
                assert time.monotonic() < give_up
                time.sleep(0.05)

        yield wait


def test_a_fresh_process_reuses_what_another_prefilled(
    servers: tuple[Server, Server], stored: Callable[[Messages], None]
) -> None:
    first, second = servers
    prompt = chat(SYSTEM, "When is breakfast?")
    cold = first.ask(prompt)
    assert cached(cold) == 0
    stored(prompt)
    warm = second.ask(chat(SYSTEM, "Where am I?"))
    # Up to the end of the system prompt, which is no block boundary.
    assert 512 < cached(warm) < warm.usage.prompt_tokens
    assert warm.usage.prompt_tokens - cached(warm) < 20
    again = second.ask(prompt)
    assert text(again) == text(cold)
    assert again.usage.prompt_tokens - cached(again) < 20


def test_streams_report_what_was_cached(servers: tuple[Server, Server]) -> None:
    prompt = chat("streams " + SYSTEM, "When is breakfast?")
    whole = servers[0].ask(prompt)
    chunks = list(servers[0].ask(prompt, stream=True, stream_options={"include_usage": True}))
    words = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(words) == text(whole)
    # The very prompt again: all of it but the token that generation begins with.
    assert cached(chunks[-1]) == whole.usage.prompt_tokens - 1


def test_a_conversation_never_prefills_more_than_what_is_new(
    servers: tuple[Server, Server], stored: Callable[[Messages], None]
) -> None:
    """Its ten turns go to the two servers in turn, as behind a load balancer. New is what comes
    after the last prompt: an answer, which the other server gave, and a question. A server that has
    nearly as much itself prefills the rest where that is faster than a restore: a block at most."""
    turns = ["Tell me about the hotel."]
    before = 0
    for number in range(10):
        messages = chat("conversation " + SYSTEM, *turns)
        reply = servers[number % 2].ask(messages, tokens=12)
        new = reply.usage.prompt_tokens - before
        if number:
            assert reply.usage.prompt_tokens - cached(reply) <= new + BLOCK_TOKENS
        before = reply.usage.prompt_tokens
        stored(messages)
        turns += [text(reply), f"And what else, number {number}?"]


def test_parallel_clients(
    servers: tuple[Server, Server], stored: Callable[[Messages], None]
) -> None:
    first, second = servers
    prompts = [chat("parallel " + SYSTEM, f"What is {number} and {number}?") for number in range(8)]
    alone = [text(first.ask(prompt)) for prompt in prompts]
    stored(prompts[0])
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(second.ask, prompts))
    assert [text(reply) for reply in together] == alone
    assert all(cached(reply) >= 512 for reply in together)


def test_a_prompt_that_is_known_to_its_end(servers: tuple[Server, Server]) -> None:
    """mlx_lm.server dies when a prompt equals an earlier prompt and its answer."""
    complete = servers[0].client.completions.create
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    prompt = "exactly. " + SYSTEM
    answer = complete(prompt=prompt, **options).choices[0].text
    for known in (prompt, prompt + answer, prompt + answer):
        reply = complete(prompt=known, **options)
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 8
    assert servers[0].healthy()


def test_requests_that_are_served_one_by_one(servers: tuple[Server, Server]) -> None:
    """A seed makes mlx_lm.server leave its batch."""
    first, second = servers
    prompt = chat("seed " + SYSTEM, "When is breakfast?")
    wanted = text(first.ask(prompt))
    for server in servers:
        assert text(server.ask(prompt, seed=1)) == wanted
    assert cached(first.ask(prompt, seed=1)) > 512
    assert cached(second.ask(prompt)) > 512


def test_an_agent_sends_results_of_tools(
    servers: tuple[Server, Server], stored: Callable[[Messages], None]
) -> None:
    """Then mlx_lm.server keeps nothing of a prompt's beginning apart, and Pion has its blocks."""
    call = {"id": "1", "type": "function", "function": {"name": "ring", "arguments": "{}"}}
    asked: Any = [
        *chat("agent " + SYSTEM, "Ring the bell."),
        {"role": "assistant", "content": "I will.", "tool_calls": [call]},
    ]
    first, second = servers
    prompts = [[*asked, {"role": "tool", "tool_call_id": "1", "content": n}] for n in "ab"]
    wanted = first.ask(prompts[0])
    stored(prompts[0])
    for prompt in prompts:
        reply = second.ask(prompt)
        assert reply.usage.prompt_tokens - cached(reply) <= 257
    assert text(second.ask(prompts[0])) == text(wanted)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_pion_ends_in_the_middle_of_a_stream(smollm2: Any, end: signal.Signals) -> None:
    prompt = chat(SHORT, "When is breakfast?")
    with ExitStack() as stack:
        pion = stack.enter_context(pion_server())
        options = ("--pion-url", f"pion://127.0.0.1:{pion}", "--pion-timeout", "0.5")
        server = stack.enter_context(serving(smollm2.folder, *options))
        (process,) = (each for each in psutil.Process().children() if str(pion) in each.cmdline())
        stream = server.ask(prompt, tokens=24, stream=True)
        next(iter(stream))
        process.send_signal(end)
        stack.callback(process.kill)
        chunks = [chunk.choices[0] for chunk in stream]
        assert chunks[-1].finish_reason in ("length", "stop")
        other = server.ask(chat("other " + SHORT, "When is breakfast?"))
        assert text(other)
        assert server.healthy()


def test_pion_hangs(smollm2: Any) -> None:
    """It accepts connections and never says a word; a request waits for that once."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"pion://127.0.0.1:{mute.getsockname()[1]}"
        options = ("--pion-url", url, "--pion-timeout", "0.2")
        with serving(smollm2.folder, *options) as server:
            replies = [server.ask(chat(f"{n} " + SHORT, "Hello?")) for n in range(2)]
            assert all(text(reply) for reply in replies)
            assert server.healthy()


def test_it_starts_a_pion_server_and_ends_it(smollm2: Any, tmp_path: Path) -> None:
    """Whichever way it ends, and that keeps its prefixes in the folder that was named."""
    prompt = chat(SYSTEM, "When is breakfast?")
    options = ("--pion-budget-gb", "0.5", "--pion-dir", str(tmp_path))
    answers = []
    for end, status in ((signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -9)):
        with serving(smollm2.folder, *options) as server:
            (pion,) = psutil.Process(server.process.pid).children()
            assert "500000000" in pion.cmdline()
            answers.append(server.ask(prompt))
            server.process.send_signal(end)
            assert server.process.wait(30) == status
            while pion.is_running() and pion.status() != psutil.STATUS_ZOMBIE:
                assert end == signal.SIGKILL
                time.sleep(0.05)
    assert [cached(answer) > 512 for answer in answers] == [False, True, True]
    assert len({text(answer) for answer in answers}) == 1


@pytest.mark.parametrize("family", ["lfm2", "gemma3_text", "mamba2"])
def test_models_that_cannot_go_back(smollm2: Any, url: str, tmp_path: Path, family: str) -> None:
    """A prompt that leaves an earlier one in its middle gets the blocks up to there, also in a
    fresh process; mlx_lm.server alone reuses nothing."""
    folder = tmp_path / family
    write_folder(family, Path(smollm2.folder), folder)
    with serving(str(folder), "--pion-url", url) as first:
        cold = first.ask(chat(SYSTEM + "The bar is open.", "Hello?"))
        assert cached(cold) == 0
        time.sleep(10 * PAUSE_S)  # such a small model has answered before it stores
        other = first.ask(chat(SYSTEM + "The bar is shut.", "Hello?"))
        assert cached(other) == other.usage.prompt_tokens // 256 * 256
    with serving(str(folder), "--pion-url", url) as second:
        fresh = second.ask(chat(SYSTEM + "The bar is shut.", "Hello?"))
        assert fresh.usage.prompt_tokens - cached(fresh) < 20
        assert text(fresh) == text(other)


def test_a_thinking_model_with_tools(smollm2: Any, url: str, tmp_path: Path) -> None:
    """Its prompts begin with tools, and end with an opened thought, which belongs to no other
    prompt; what comes before that is found again, by this process and by the next."""
    folder = tmp_path / "thinking"
    write_folder("lfm2", Path(smollm2.folder), folder, thinking=True)
    ring, sing = (
        [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}]
        for name in ("ring", "sing")
    )
    prompt = chat("thinking " + SYSTEM, "Hello?")
    with serving(str(folder), "--pion-url", url) as first:
        reply = first.ask(prompt, tools=ring)
        assert reply.choices[0].message.reasoning
        turns = [*prompt, {"role": "assistant", "content": "Hi."}, prompt[1]]
        assert cached(first.ask(turns, tools=ring)) >= reply.usage.prompt_tokens - 8
        assert cached(first.ask(prompt, tools=sing)) == 0
    with serving(str(folder), "--pion-url", url) as second:
        again = second.ask(prompt, tools=ring)
        assert again.usage.prompt_tokens - cached(again) < 8
        assert again.choices[0].message.reasoning == reply.choices[0].message.reasoning


def test_what_is_wrong_with_the_command_line_is_said() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pion_vllm_mlx.cli", "serve", "--pion-url", "pion://h", "--no-such"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "--no-such" in done.stderr
