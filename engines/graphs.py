"""What `graphs.json` says: the graphs of an exported directory, their tensors and their states.

The runtime allocates and binds from these descriptions alone; no tensor name is ever parsed.
Dimensions are numbers or, until `build` pins them, the symbols `T` (rows of a pass), `R` (rows with
logits), `C` (cache capacity), `G` (drafts), `M` (G + 1), `D` (passes of a drafting model) and `W`
(positions whose noise is held).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

GRAPHS_SCHEMA = 1
GRAPHS_FILE = "graphs.json"

Dim = int | str
Mask = Literal["chain", "tree"]
ElementType = Literal["float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool"]


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a graph."""

    name: str
    dtype: ElementType
    dims: tuple[Dim, ...]

    def pinned(self, values: dict[str, int]) -> TensorSpec:
        """The same tensor with every symbol that `values` names replaced."""
        dims = tuple(values.get(d, d) if isinstance(d, str) else d for d in self.dims)
        return replace(self, dims=dims)


@dataclass(frozen=True)
class StateSpec:
    """A cache: what goes in as `input` comes out as `output`, in the same memory when `aliased`."""

    input: str
    output: str
    kind: Literal["self", "cross", "recurrent"]
    length_axis: int
    dtype: ElementType
    dims: tuple[Dim, ...]
    window: int | None
    aliased: bool


@dataclass(frozen=True)
class RoleSpec:
    """One use of a model graph: `rows` per pass, of which `logit_rows` get logits.

    In an exported directory the two may be the expressions `chunk` and `gamma+1`.
    """

    name: str
    rows: Dim
    logit_rows: Dim
    mask: Mask


@dataclass(frozen=True)
class TapSpec:
    """Hidden states of a layer boundary that a head needs."""

    name: str
    layer: int


WeightFormat = Literal["int8", "int4", "fp8", "nvfp4"]
FP4_BLOCK = 16  # numbers of E2M1 that share a scale
Calibrator = Literal["minmax", "percentile", "entropy"]
Activations = Literal["int8", "fp8", "int8 by row"]
BY_ROW: Activations = "int8 by row"
Quantizer = Literal["rtn", "k-quant", "hqq", "gptq", "awq", "modelopt"]


@dataclass(frozen=True)
class QuantizationSpec:
    """How a model was made of fewer bits than it was exported with.

    Attributes:
        weights: of the matrices inside the layers; None: as exported.
        quantizer: how they were rounded.
        block: rows of a column that share a scale; 0: all of them. Where they do not divide a
            matrix, those of more than 64 are halved.
        zeros: each block has a zero point.
        head: of the matrix that makes the logits; None: as exported.
        kv: of the caches; None: as exported.
        activations: of what matrices inside the layers are multiplied by: with a scale fixed by
            texts, or `int8 by row`, with scales of each row as the kernel takes them; None: as
            exported.
        calibrator: what decided such a fixed scale.
    """

    weights: WeightFormat | None = None
    quantizer: Quantizer = "rtn"
    block: int = 0
    zeros: bool = False
    head: Literal["int8", "int4"] | None = None
    kv: Literal["int8"] | None = None
    activations: Activations | None = None
    calibrator: Calibrator = "minmax"

    @property
    def _by(self) -> str:
        return "" if self.calibrator == "minmax" else f" ({self.calibrator})"

    def describe(self) -> str:
        """Such as `weights int4 (gptq, blocks of 32), head int8, caches int8`."""
        block = FP4_BLOCK if self.weights == "nvfp4" else self.block
        scales = f"blocks of {block}" if block else "a scale a column"
        parts = [
            self.weights and f"weights {self.weights} ({self.quantizer}, {scales})",
            self.head and f"head {self.head}",
            self.activations and f"activations {self.activations}{self._by}",
            self.kv and f"caches {self.kv}",
        ]
        return ", ".join(part for part in parts if part) or "as exported"


@dataclass(frozen=True)
class ModelSpec:
    """A target or a draft.

    Attributes:
        file: the graph, relative to the directory.
        architecture: class name of the model it was traced from.
        dtype: element type of the weights and caches.
        vocabulary: size of a row of logits.
        max_position: positions the model was made for; later ones are clamped.
        layers: number of layers.
        inputs: every input, caches included, in graph order.
        outputs: every output, caches included, in graph order.
        states: the caches.
        taps: hidden states among the outputs.
        roles: how the graph is used.
        parameters_bytes: size of the weights.
        quantization: what was made smaller after the export; None: nothing.
    """

    file: str
    architecture: str
    dtype: ElementType
    vocabulary: int
    max_position: int
    layers: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    states: tuple[StateSpec, ...]
    taps: tuple[TapSpec, ...]
    roles: tuple[RoleSpec, ...]
    parameters_bytes: int
    quantization: QuantizationSpec | None = None

    def role(self, name: str) -> RoleSpec:
        """The role called `name`."""
        return next(role for role in self.roles if role.name == name)


@dataclass(frozen=True)
class SamplingSpec:
    """A sampling graph: `propose_*`, `accept_*` or `sample_*`."""

    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class TextSpec:
    """How text becomes ids and back.

    Attributes:
        tokenizer: file for `tokenizers.Tokenizer.from_file`.
        tokenizer_sha256: of that file.
        chat_template: jinja file, if the checkpoint has one.
        special_tokens: names such as `bos_token`, for the template.
        bos_id: first token of a text; None when the tokenizer has none.
        add_bos: whether encoding a prompt puts `bos_id` in front.
        end_ids: tokens that end a text.
        vocabulary: ids the tokenizer knows.
    """

    tokenizer: str
    tokenizer_sha256: str
    chat_template: str | None
    special_tokens: dict[str, str]
    bos_id: int | None
    add_bos: bool
    end_ids: tuple[int, ...]
    vocabulary: int


@dataclass(frozen=True)
class ParitySpec:
    """What the parity check at export found, per model.

    Attributes:
        cases: passes compared (row counts x lengths).
        positions: highest position compared, plus one.
        worst_logit: largest difference of a logit.
        worst_cache: largest difference of a cache entry.
        tolerance: what `worst_logit` was held against.
        argmax_agreement: share of rows with the same best token.
    """

    cases: int
    positions: int
    worst_logit: float
    worst_cache: float
    tolerance: float
    argmax_agreement: float


@dataclass(frozen=True)
class FileSpec:
    """A file of a directory that is described."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class GraphsSpec:
    """The whole of `graphs.json`.

    Attributes:
        schema: version of this description.
        producer: what made it, name to version.
        source: what the checkpoints were called, model name to source.
        opset: of every graph.
        method: `model` (a drafting model), `ngram` (prompt lookup) or `none`.
        models: `target`, and `draft` for method `model`.
        sampling: sampling graphs by name.
        text: tokenizer and chat template.
        parity: what was checked against the checkpoint, by model name.
        files: every other file of the directory by relative path.
    """

    schema: int
    producer: dict[str, str]
    source: dict[str, str]
    opset: int
    method: Literal["model", "ngram", "none"]
    models: dict[str, ModelSpec]
    sampling: dict[str, SamplingSpec]
    text: TextSpec
    parity: dict[str, ParitySpec]
    files: dict[str, FileSpec]


TARGET_ROLES = (
    RoleSpec("prefill", "chunk", 2, "chain"),
    RoleSpec("verify", "gamma+1", "gamma+1", "chain"),
    RoleSpec("decode", 1, 1, "chain"),
    RoleSpec("exact_decode", 2, 2, "chain"),
)
DRAFT_ROLES = (
    RoleSpec("prefill", "chunk", 1, "chain"),
    RoleSpec("catch_up", 2, 1, "chain"),
    RoleSpec("step", 1, 1, "chain"),
)


# Roles of one row that an engine without a kernel for it is compiled for with two, the second junk.
JUNK_ROLES = frozenset({"decode", "step"})


def without_junk(role: RoleSpec) -> RoleSpec:
    """A role with the rows it is for, whatever it was compiled for."""
    if role.name in JUNK_ROLES and (role.rows, role.logit_rows) == (2, 2):
        return replace(role, rows=1, logit_rows=1)
    return role


def verify_name(gamma: int, widest: int) -> str:
    """The role that verifies rounds of up to `gamma` drafts; `verify` is the widest one."""
    return "verify" if gamma == widest else f"verify_{gamma}"


def pinned_roles(
    roles: tuple[RoleSpec, ...], chunk: int, gammas: tuple[int, ...]
) -> tuple[RoleSpec, ...]:
    """Roles with numbers for rows.

    Args:
        roles: of an exported directory, whose rows may be `chunk` and `gamma+1`.
        chunk: rows of a prefill pass.
        gammas: drafts that rounds are built for, ascending; none without a draft.

    Returns:
        The roles, `verify` once for each gamma and the widest first.
    """
    pinned: list[RoleSpec] = []
    for role in roles:
        if role.rows == "gamma+1":
            for gamma in reversed(gammas):
                name, rows = verify_name(gamma, gammas[-1]), gamma + 1
                pinned.append(replace(role, name=name, rows=rows, logit_rows=rows))
        else:
            pinned.append(replace(role, rows=chunk if role.rows == "chunk" else role.rows))
    return tuple(pinned)


# --- sampling: what export and runtime have to agree on -----------------------------------------

BLOCK = 64  # rows of the sampling graphs are padded to whole blocks of tokens
MOST_DRAWN_BLOCKS, MOST_PLACES = 4096, 16
LISTED = 256  # tokens that the filters `top` and `nucleus` list; above every top-k they serve
NGRAM_LIMIT = 8
BIAS_SLOTS, END_SLOTS = 64, 8
TOP_LOGPROBS = 20

Filters = Literal["top", "nucleus", "any", "typical"]
FILTERS: tuple[Filters, ...] = ("top", "nucleus", "any", "typical")


def padded_vocabulary(vocabulary: int) -> int:
    """V64: the width of a row in the sampling graphs."""
    return -(-vocabulary // BLOCK) * BLOCK


def race_blocks(vocabulary: int) -> int:
    """B: blocks of the first heat of a draw. Blocks have 1 to 16 tokens, few where V is small."""
    blocks = padded_vocabulary(vocabulary)
    while blocks > MOST_DRAWN_BLOCKS and padded_vocabulary(vocabulary) // blocks < MOST_PLACES:
        blocks //= 2
    return blocks


def race_size(vocabulary: int) -> int:
    """K: exponentials of a draw, one for each block and one for each place inside a block.

    Rounded up, so that a row of races starts at an address that any engine takes.
    """
    blocks = race_blocks(vocabulary)
    return -(-(blocks + padded_vocabulary(vocabulary) // blocks) // BLOCK) * BLOCK


@dataclass(frozen=True)
class WeighingKey:
    """Names a graph that turns raw logits into what a token is chosen from.

    What is off is not in the graph. The values of what is on are inputs. Filters follow, in graphs
    of their own: `filter_top` and the others of `FILTERS`.

    Attributes:
        model: whose logits; the draft's own graphs exist where its vocabulary has another size.
        is_drawn: the outcome is the distribution `p`; otherwise (temperature 0) edited logits.
        edits: penalties, no-repeat n-gram, logit bias and the first allowed end token.
        mask: a bit mask of allowed tokens for each row.
    """

    model: Literal["target", "draft"] = "target"
    is_drawn: bool = True
    edits: bool = False
    mask: bool = False

    @property
    def name(self) -> str:
        """Such as `distribution+edits` or `draft_scores+mask`."""
        stem = "distribution" if self.is_drawn else "scores"
        on = [stem if self.model == "target" else f"{self.model}_{stem}"]
        return "+".join(on + ["edits"] * self.edits + ["mask"] * self.mask)


def weighing_keys(model: Literal["target", "draft"]) -> tuple[WeighingKey, ...]:
    """Every graph of that kind. Raw logits need none at temperature 0."""
    changes = [(edits, mask) for edits in (False, True) for mask in (False, True)]
    return (
        *(WeighingKey(model, False, *change) for change in changes if any(change)),
        *(WeighingKey(model, True, *change) for change in changes),
    )
