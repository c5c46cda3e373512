"""Options of `run`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

from spec_export.options import DRAFTS, OUTPUT, RuleName, argument, option, shown

# The group of options in the help of a command.
_SAMPLING = "Sampling"


class DraftSamplingName(str, Enum):
    """How a drafting model chooses its tokens."""

    probabilistic = "probabilistic"
    greedy = "greedy"


Pipeline = Annotated[
    bool | None,
    option(
        "Enqueue a round before the last one was read.",
        "--pipeline/--no-pipeline",
        default="where the device works on its own",
    ),
]
Stdin = Annotated[str | None, argument("-", "Read the prompt from stdin.")]
Prompt = Annotated[str | None, option("The prompt.", metavar="TEXT", default="read from stdin")]
Chat = Annotated[bool, option("Put the prompt into the chat template.", "--chat")]
Gamma = Annotated[
    str | None,
    option(
        "Drafts per round, 0 (off) to the built gamma, or auto: what pays, by the profile.",
        metavar="N",
        group=DRAFTS,
        default="the built one",
    ),
]
DraftConfidence = Annotated[
    float | None,
    option(
        "Draft no further than a token whose row gives its best one less, 0 (off) to 1.",
        metavar="P",
        group=DRAFTS,
        default="off, or with --gamma auto what the profile says",
    ),
]
FastPlain = Annotated[
    bool,
    option(
        "Passes without drafts compute one row: faster, perhaps other bits.",
        "--fast-plain",
        group=DRAFTS,
    ),
]
MaxTokens = Annotated[
    int | None,
    option(
        "Tokens to generate at most.",
        metavar="N",
        group=_SAMPLING,
        default="to the end of the context",
    ),
]
Temperature = Annotated[
    float, shown("0 takes the most probable token.", metavar="T", group=_SAMPLING)
]
Seed = Annotated[
    int | None,
    option("Of all randomness.", metavar="S", group=_SAMPLING, default="drawn, and reported"),
]
Samples = Annotated[
    int | None,
    option(
        "Texts to generate, each with a seed of its own.",
        metavar="N",
        group=_SAMPLING,
        default="1",
    ),
]
Rule = Annotated[
    RuleName | None,
    option(
        "How drafts are accepted above temperature 0; all follow the target's law.",
        group=_SAMPLING,
        default="invariant with --seed, else reject",
    ),
]
DraftSampling = Annotated[
    DraftSamplingName, shown("How a drafting model chooses.", group=_SAMPLING)
]
TopK = Annotated[int, shown("Keep the K most probable tokens; 0: all.", group=_SAMPLING)]
TopP = Annotated[float, shown("Keep the most probable tokens up to this share.", group=_SAMPLING)]
MinP = Annotated[
    float, shown("Drop tokens less probable than this share of the best.", group=_SAMPLING)
]
TypicalP = Annotated[
    float, shown("Keep tokens whose surprise is nearest the entropy.", group=_SAMPLING)
]
RepetitionPenalty = Annotated[
    float, shown("Divides logits of tokens seen, prompt included.", group=_SAMPLING)
]
PresencePenalty = Annotated[float, shown("Taken off logits of tokens generated.", group=_SAMPLING)]
FrequencyPenalty = Annotated[
    float, shown("Taken off logits of tokens generated, once for each time.", group=_SAMPLING)
]
NoRepeatNgram = Annotated[int, shown("No n-gram twice; 0: off.", metavar="N", group=_SAMPLING)]
LogitBias = Annotated[
    list[str] | None,
    option("Added to a logit; may be given again.", metavar="ID=BIAS", group=_SAMPLING),
]
Ban = Annotated[
    list[int] | None,
    option("A token that may not come; may be given again.", metavar="ID", group=_SAMPLING),
]
Allow = Annotated[
    list[int] | None,
    option(
        "A token that may come, and no others; may be given again.", metavar="ID", group=_SAMPLING
    ),
]
MinTokens = Annotated[int, shown("No end token before these.", metavar="N", group=_SAMPLING)]
JsonSchema = Annotated[
    Path | None,
    option("The text matches the JSON schema in FILE.", metavar="FILE", group=_SAMPLING),
]
Regex = Annotated[str | None, option("The text matches REGEX.", metavar="REGEX", group=_SAMPLING)]
Lark = Annotated[
    Path | None, option("The text follows the grammar in FILE.", metavar="FILE", group=_SAMPLING)
]
Logprobs = Annotated[
    int,
    shown("With --json: alternatives listed for each token, 0 to 20.", metavar="N", group=OUTPUT),
]
Stop = Annotated[
    list[str] | None,
    option("End before this text; may be given again.", metavar="TEXT", group=_SAMPLING),
]
Compare = Annotated[
    bool,
    option(
        "Time the text against plain decoding: does speculation pay?",
        "--compare",
        group=OUTPUT,
    ),
]
RunAsJson = Annotated[
    bool, option("One JSON object on stdout, nothing else.", "--json", group=OUTPUT)
]
TextOnly = Annotated[bool, option("The text only.", "-q", "--quiet", group=OUTPUT)]
