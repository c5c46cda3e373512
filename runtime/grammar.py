"""Which tokens a grammar lets follow: a bit mask for every row, advanced and rolled back by token.

Knows one tokenizer and the text so far; knows nothing of models, drafts or sampling. A schema,
regex or grammar comes from a request and is not trusted; its masks go to the sampling graphs, which
set the probability of every other token to 0, in q before a draft is drawn and in p before it is
judged. The matching is done by llguidance (extra `[grammar]`), imported when first needed.

    tokenizer = GrammarTokenizer(file, vocabulary, end_ids)        # once a bundle
    state = tokenizer.state(Grammar("regex", "[a-z]+"))            # once a text
    state.fill(words); state.advance(token); state.rollback(1)     # once a row

A token is allowed exactly when the text so far and its bytes can be continued to a match. The
library's own default narrows a text that has no choice to its canonical tokens; it is turned off
(`no_forcing`), because then masks and `advance` would disagree about drafts.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from spec_export.engines.errors import RequestError
from spec_export.engines.extras import require

if TYPE_CHECKING:
    from llguidance import LLMatcher

Kind = Literal["json_schema", "regex", "lark"]
_Result = TypeVar("_Result")

# The library has no time-outs, only these bounds, here far below its own. 2026-11-29, x86-64,
# V=151936: `s: s s s s | s s s | s s | "a" | "b" |` took 2.7 s a mask at its defaults and is now
# refused before one takes 0.1 s. Of 2499 real schemas (maskbench) they refuse 1 that the defaults
# accept, and the length 32. The worst left: 30 alternatives of `multipleOf` near 1e5, 0.6 s a mask
# and 770 MB.
_MAX_BYTES = 65536
_MAX_GRAMMAR_SYMBOLS = 20_000
_MAX_LEXER_FUEL = 300_000  # to compile; a mask has the library's own 200_000
_MAX_LEXER_STATES = 50_000  # 1 to 2 kB each, by its documentation
_MAX_ROW_ITEMS = 1200  # an object takes 4 for each optional property
_MAX_MASK_ITEMS = 10_000
_MAX_MESSAGE = 400
# The library recurses over rules and references without a bound of its own: 3000 chained rules
# (37 kB) overflow the usual 8 MiB and end the process. The worst 64 KiB found needs under 64 MiB;
# of this much address space a thread takes what it touches.
_STACK_BYTES = 256 << 20
_STACK_SIZE = threading.Lock()  # held while the size for new threads, one a process, is ours


@dataclass(frozen=True)
class Grammar:
    """What a text has to match from its first token to its last.

    Attributes:
        kind: `json_schema` (draft 2020-12; what cannot be kept is refused, never ignored), `regex`
            (as in Rust's regex crate, the whole text) or `lark` (llguidance's dialect; a rule that
            has no end is followed as if it had one).
        text: the schema, regex or grammar.

    Raises:
        RequestError: another kind, or a longer text than is accepted.
    """

    kind: Kind
    text: str

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            kinds = ", ".join(get_args(Kind))
            raise RequestError(f"a grammar of kind {self.kind!r}; it is one of {kinds}")
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError as error:
            raise RequestError(f"the {self.kind} is not text: {error}") from error
        if size > _MAX_BYTES:
            raise RequestError(f"the {self.kind} has {size} bytes; it may have {_MAX_BYTES}")


class GrammarTokenizer:
    """The tokenizer of a bundle as the matcher needs it: made once, shared by all texts.

    Args:
        tokenizer_file: the bundle's `tokenizer.json`, byte-level or with byte fallback.
        vocabulary: V, ids of the target's logits; may be more or fewer than the tokenizer's.
        end_ids: tokens that end a text.

    Attributes:
        words: length of a mask, V rounded up to 64 and divided by 16.
        end_ids: the end tokens.
        known: ids below it are known to both the tokenizer and the model.
        mask_bytes: length of the library's own mask.
        text_mask: `[n] uint16`, read only, the ids that may stand for text: known to the tokenizer
            and the model, and no end token.
        end_mask: `[words] int32`, read only, the end tokens.

    Raises:
        MissingExtra: llguidance is not installed.
        RequestError: the tokenizer is of another kind, or the end tokens are not among its ids.
    """

    def __init__(self, tokenizer_file: Path, vocabulary: int, end_ids: Sequence[int]) -> None:
        require("grammar", "llguidance")
        from llguidance import LLParserLimits, LLTokenizer

        if not end_ids or not all(0 <= end < vocabulary for end in end_ids):
            raise RequestError(
                f"end tokens {list(end_ids)} of a vocabulary of {vocabulary}: a text under a "
                "grammar needs one to end with"
            )
        path = str(tokenizer_file.resolve())  # the library takes "{..." and "byte" for no file
        self._library = _call(
            lambda: LLTokenizer(path, eos_token=list(end_ids)),
            "this bundle's tokenizer cannot be used with a grammar",
        )
        self._limits = LLParserLimits(
            max_items_in_row=_MAX_ROW_ITEMS,
            step_max_items=_MAX_MASK_ITEMS,
            initial_lexer_fuel=_MAX_LEXER_FUEL,
            max_lexer_states=_MAX_LEXER_STATES,
            max_grammar_size=_MAX_GRAMMAR_SYMBOLS,
            verbose_errors=False,
        )
        self.words = -(-vocabulary // 64) * 4
        self.end_ids = frozenset(end_ids)
        self.known = min(vocabulary, self._library.vocab_size)
        self.mask_bytes = -(-self._library.vocab_size // 32) * 4
        text = np.ones(self.known, np.bool_)
        text[[end for end in self.end_ids if end < self.known]] = False
        ends = np.zeros(vocabulary, np.bool_)
        ends[list(self.end_ids)] = True
        self.text_mask = _packed(text, min(self.mask_bytes // 2, self.words))
        self.end_mask = _packed(ends, self.words).astype(np.int32)
        self.text_mask.setflags(write=False)
        self.end_mask.setflags(write=False)

    def state(self, grammar: Grammar) -> GrammarState:
        """Begin a text under a grammar.

        Raises:
            RequestError: the library refuses it, in its words, or no text matches it.
        """
        source = _source(grammar)
        return GrammarState(self, lambda: self._matcher(grammar.kind, source))

    def _matcher(self, kind: Kind, source: str) -> LLMatcher:
        from llguidance import LLMatcher

        refusal = f"the {kind} cannot be used"
        matcher = _call(
            lambda: LLMatcher(self._library, source, log_level=0, limits=self._limits), refusal
        )
        if matcher.is_error():
            raise RequestError(f"{refusal}: {_message(matcher.get_error())}")
        return matcher


class GrammarState:
    """The matcher of one text, over the token ids of one bundle. Not for two threads at once.

    Every method may raise `RequestError` when the grammar leads nowhere or becomes too complex;
    the state is then as it was before the call.
    """

    def __init__(self, tokenizer: GrammarTokenizer, make: Callable[[], LLMatcher]) -> None:
        self._tokenizer, self._make, self._matcher = tokenizer, make, make()
        self._tokens: list[int] = []  # what the matcher has taken in
        self._ended = 0  # end tokens after them; the matcher never sees one
        self._mask = np.zeros(tokenizer.words, np.int32)
        self._library_mask = np.zeros(tokenizer.mask_bytes // 4, np.uint32)
        self._address = self._library_mask.ctypes.data
        # Little endian, as all platforms we build for: the low half of a word comes first.
        self._allowed = self._library_mask.view(np.uint16)[: len(tokenizer.text_mask)]
        self._text_words = self._mask[: len(tokenizer.text_mask)]
        self._current = False  # whether the mask is that of the next token
        self._open = True  # whether the mask has a token that is no end token
        self._compute()

    def fill(self, words: NDArray[np.int32]) -> None:
        """Write the mask of the next token.

        Args:
            words: `[words] int32`, contiguous, owned by the caller. Bit i % 16 of word i // 16 is
                set when token i is allowed; nothing is allocated.
        """
        self._compute()
        np.copyto(words, self._mask)

    def advance(self, token: int) -> bool:
        """Take in a token; False, and nothing changed, when it is not allowed."""
        if token in self._tokenizer.end_ids:
            allowed = self._ended > 0 or self._matcher.is_accepting()
            self._ended += allowed
        elif self._ended or not 0 <= token < self._tokenizer.known:
            allowed = False
        else:
            allowed = self._matcher.try_consume_tokens([token]) == 1
            self._check()
            if allowed:
                self._tokens.append(token)
        self._current = self._current and not allowed
        return allowed

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens, end tokens among them."""
        assert 0 <= count <= len(self._tokens) + self._ended
        ends = min(count, self._ended)
        self._ended -= ends
        kept = len(self._tokens) - (count - ends)
        if kept < len(self._tokens):
            del self._tokens[kept:]
            if not self._matcher.rollback(count - ends):
                self._matcher = self._replayed()  # a lark grammar with `max_tokens` or `stop`
        self._current = self._current and not count

    @property
    def finished(self) -> bool:
        """Whether only an end token may follow."""
        self._compute()
        return not self._open

    def _compute(self) -> None:
        """Bring the mask up to date."""
        if self._current:
            return
        if self._ended:
            np.copyto(self._mask, self._tokenizer.end_mask)
            self._open = False
        else:
            self._compute_text()
        self._current = True

    def _compute_text(self) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._address, self._library_mask.nbytes)
        self._check()
        # The library's own end bits go: it sets them in the middle of a grammar that names them.
        np.bitwise_and(self._allowed, self._tokenizer.text_mask, out=self._allowed)
        np.copyto(self._text_words, self._allowed)
        self._open = bool(np.count_nonzero(self._allowed))  # `any` allocates
        if self._matcher.is_accepting():
            np.bitwise_or(self._mask, self._tokenizer.end_mask, out=self._mask)
        elif not self._open:
            self._fail("NoExtension")

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error()
            self._matcher = self._replayed()  # it never leaves an error by itself
            self._fail(reason)

    def _replayed(self) -> LLMatcher:
        matcher = self._make()
        matcher.consume_tokens(self._tokens)
        return matcher

    def _fail(self, reason: str) -> NoReturn:
        dead = reason.startswith("NoExtension")
        why = "no token of this model can follow" if dead else _message(reason)
        raise RequestError(f"the grammar cannot go on after {len(self._tokens)} tokens: {why}")


def _source(grammar: Grammar) -> str:
    """The library's JSON: a grammar that turns forcing off and refers to the one asked for."""
    from llguidance import LLMatcher, regex_to_lark

    if grammar.kind == "json_schema":
        # Asked for options, even none, the library reads the text as one JSON object, and it stays
        # one where it is put; otherwise it is only pasted, whatever follows it.
        _call(
            lambda: LLMatcher.grammar_from_json_schema(grammar.text, defaults={}),
            "the json_schema cannot be used",
        )
        body = f'"json_schema": {grammar.text}'
    elif grammar.kind == "regex":
        body = f'"lark_grammar": {json.dumps(f"start: /{regex_to_lark(grammar.text)}/")}'
    else:
        body = f'"lark_grammar": {json.dumps(grammar.text)}'
    top = json.dumps({"lark_grammar": '%llguidance {"no_forcing": true}\nstart: @text\n'})
    return f'{{"grammars": [{top}, {{"name": "text", {body}}}]}}'


def _call(make: Callable[[], _Result], refusal: str) -> _Result:
    """Run a call into the library on a stack deep enough for whatever a request may hold.

    Raises:
        RequestError: it raised; `refusal` comes before its own words.
    """
    made: list[_Result] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            made.append(make())
        except BaseException as error:  # a panic of the library is no Exception
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)
    with _STACK_SIZE:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if raised:
        raise RequestError(f"{refusal}: {_message(str(raised[0]))}") from raised[0]
    return made[0]


def _message(reason: str) -> str:
    """The library's words on one line, without what it echoes of a long request."""
    line = " ".join(reason.replace("<non-verbose/>", "").split())
    return line if len(line) <= _MAX_MESSAGE else f"{line[:_MAX_MESSAGE]}..."


def _packed(bits: NDArray[np.bool_], words: int) -> NDArray[np.uint16]:
    """`[words] uint16`: bit i % 16 of word i // 16 is `bits[i]`."""
    padded = np.zeros(words * 16, np.bool_)
    padded[: len(bits)] = bits[: words * 16]
    return np.packbits(padded, bitorder="little").view(np.uint16)
