"""What acceptance is measured on where no prompts are given: short, in several kinds.

Acceptance depends on the text more than on anything else: code and copying repeat, prose does not.
Whoever knows what the device will be asked should measure on that instead.
"""

from __future__ import annotations

_PARAGRAPH = (
    "The town library opened its new reading room on Monday. It has forty seats, two long tables "
    "and a wall of windows that faces the river. The room was paid for by a fund that the town set "
    "up ten years ago, after the old room had been closed because of a leaking roof. On the first "
    "day about two hundred people came. The librarian said that the room will stay open until nine "
    "in the evening on weekdays and until noon on Saturdays."
)
_LIST = (
    "Name: Ada Brook; city: Leeds; order: 3 lamps. Name: Ben Stone; city: York; order: 1 desk. "
    "Name: Cleo Marsh; city: Hull; order: 6 chairs. Name: Dan Field; city: Bath; order: 2 shelves."
)

PROMPTS: tuple[tuple[str, str], ...] = (
    ("writing", "Write a short letter to a friend about a rainy weekend by the sea."),
    ("writing", "Describe an old clock shop in the voice of its youngest clock."),
    ("coding", "Write a Python function that returns the n-th Fibonacci number, with a docstring."),
    ("coding", "Show how to read a CSV file in Python and print the sum of its second column."),
    ("qa", "Why is the sky blue during the day and red at sunset?"),
    ("qa", "What is the difference between a virus and a bacterium?"),
    (
        "math",
        "A train covers 180 km in 2 hours and 30 minutes. What is its average speed? Show steps.",
    ),
    ("math", "Solve 3x + 7 = 31 for x and explain every step."),
    ("translation", "Translate into French: The small boat came back to the harbour before night."),
    ("translation", "Translate into German: We would like to reserve a table for four on Friday."),
    ("summary", f"Summarize in two sentences: {_PARAGRAPH}"),
    ("summary", f"Give this text a title and three bullet points: {_PARAGRAPH}"),
    ("extraction", f"Copy this list with one person a line, and change nothing else: {_LIST}"),
    ("extraction", f"Turn this list into a table with the columns name, city and order: {_LIST}"),
)
