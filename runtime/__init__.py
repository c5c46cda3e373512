"""Run a bundle: sessions, drafts, rounds, and text as a stream.

    from spec_export.runtime import Request, Session, generate, open_runtime

    opened = open_runtime("bundle")
    for piece in generate(Session(opened), opened.text.encode("Once"), Request(max_tokens=32)):
        print(piece.text, end="", flush=True)

Needs numpy, tokenizers, jinja2 and one engine library; never torch, transformers or onnx.
"""

from spec_export.runtime.grammar import Grammar
from spec_export.runtime.opened import OpenedBundle, open_runtime
from spec_export.runtime.samples import sample_requests
from spec_export.runtime.sampling import Sampling
from spec_export.runtime.session import RoundResult, Session
from spec_export.runtime.stats import Stats
from spec_export.runtime.stream import Piece, Request, generate

__all__ = [
    "Grammar",
    "OpenedBundle",
    "Piece",
    "Request",
    "RoundResult",
    "Sampling",
    "Session",
    "Stats",
    "generate",
    "open_runtime",
    "sample_requests",
]
