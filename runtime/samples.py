"""Several texts after one prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from spec_export.engines.errors import RequestError
from spec_export.runtime.stream import Request


def sample_requests(request: Request, count: int) -> Iterator[Request]:
    """A request for each of several texts after one prompt, made when it is asked for.

        for each in sample_requests(request, 4):
            text = "".join(piece.text for piece in generate(session, prompt, each))

    Text i has the seed of `Sampling.sample(i)`, the first one the request's own. It is what a run
    with that seed alone gives; each takes in the prompt anew.

    Raises:
        RequestError: `count` is below 1, or the texts could not differ.
    """
    if count < 1:
        raise RequestError(f"samples={count}: at least 1 is generated")
    if count > 1 and request.sampling.temperature == 0:
        raise RequestError(
            f"samples={count} at temperature 0, where all of them would be the same text; give a "
            "temperature"
        )
    return (replace(request, sampling=request.sampling.sample(i)) for i in range(count))
