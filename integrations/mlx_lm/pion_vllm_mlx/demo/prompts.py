"""What the demo asks: one long system prompt, which all requests share, and three questions."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from jinja2 import TemplateError

QUESTIONS = (
    "Who founded the Harbour Lane Bookshop?",
    "What is the address of the shop?",
    "Who is the bookseller for children's books?",
)

# About 512 tokens of SmolLM2's.
SYSTEM = """\
You answer customers of the Harbour Lane Bookshop. Use only these facts, and answer in one short \
sentence.

The shop was founded by Margaret Ellison in 1952.
The shop is at 12 Harbour Lane in Westhaven, opposite the fish market.
The owner of the shop today is Thomas Ellison, the grandson of Margaret.
The shop opens at 9 in the morning and closes at 6 in the evening.
The shop is closed on Mondays.
In December the shop stays open until 8 in the evening.
The telephone number of the shop is 555 0182.
The name of the shop cat is Biscuit. Biscuit sleeps in the window beside the atlases.
The ground floor has novels, crime stories and poetry.
The first floor has history, travel and sea charts.
The top floor has children's books and a reading room with a view of the harbour.
The cafe is on the ground floor. The cafe serves tea, coffee and lemon cake.
The cafe closes one hour before the shop does.
Delivery inside Westhaven is free. Delivery to other places costs 4 pounds.
Orders over 40 pounds are delivered free of charge.
The shop does not deliver to other countries.
A book that is not in stock arrives within three working days.
A book can be returned within 30 days with its receipt.
Sea charts cannot be returned, but they can be exchanged.
Second-hand books are on the shelves behind the staircase, and they cost 3 pounds each.
Customers can pay with cash or with a card.
Every Thursday at 7 in the evening an author reads from a new book. The entry is free.
Every Saturday at 10 in the morning there is a story hour for children.
The book club meets on the first Tuesday of the month.
Members of the book club get a discount of 10 percent on novels.
Gift wrapping is free. Gift cards are sold for 10, 20 and 50 pounds.
Dogs are welcome in the shop, as long as they are kind to the cat.
The shop has four booksellers. The bookseller for children's books is Anna Reyes.
The nearest bus stop is Fish Market, and the buses 4 and 17 stop there.
"""


def encode(tokenizer: Any) -> tuple[list[int], list[list[int]]]:
    """Token ids of the prefix that all questions share, and of what follows it in each."""
    prompts = [_render(tokenizer, question) for question in QUESTIONS]
    columns = takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False))
    prefix = [column[0] for column in columns]
    return prefix, [prompt[len(prefix) :] for prompt in prompts]


def _render(tokenizer: Any, question: str) -> list[int]:
    """Token ids of a whole prompt, in the model's chat form where it has one."""
    if tokenizer.chat_template is None:
        return list(tokenizer.encode(f"{SYSTEM}\nQuestion: {question}\nAnswer:"))
    system, user = {"role": "system", "content": SYSTEM}, {"role": "user", "content": question}
    try:
        return _chat(tokenizer, [system, user])
    except TemplateError:  # Gemma 2's chat form, for one, has no system role
        return _chat(tokenizer, [{"role": "user", "content": f"{SYSTEM}\n{question}"}])


def _chat(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    # Thoughts would fill the few tokens that an answer has here.
    return list(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False)
    )
