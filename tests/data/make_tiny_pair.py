"""Train the tiny target/draft pair of causal language models used by the tests.

The corpus is a plain text file with one verse (or sentence) per line. A document is one to
three consecutive lines, wrapped as ``<s> ... </s>``, so that generations often end by
themselves. The script trains a byte-level BPE tokenizer, then a Llama target on the corpus,
then a smaller Llama draft distilled from the target's next-token distribution. It writes two
Hugging Face checkpoints, ``OUT/target`` and ``OUT/draft``, and prints the measured acceptance
of the pair as JSON. See README.md beside this file for the corpus and the recorded numbers.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

BOS, EOS = "<s>", "</s>"
BOS_ID, EOS_ID = 0, 1
VOCAB_SIZE = 1031  # prime, so never a multiple of a padding or tile size
MAX_LENGTH = 512
LINES_PER_DOCUMENT = (1, 1, 2, 2, 3)
BATCH_ROWS = 4
HELD_OUT_ROWS = 32
SAMPLE_LENGTH = 128
PROMPT_LENGTH = 9
PEAK_LEARNING_RATE = 1.5e-2
# The draft is trained for fewer steps, so that it is good but far from always accepted.
DRAFT_STEPS_DIVISOR = 4
# Plain on purpose: rendered chats look like the training documents.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\\n' }}{% endfor %}"
)


def train_tokenizer(lines: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer that puts ``<s>`` in front of every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID), (EOS, EOS_ID)]
    )
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"corpus too small for a vocabulary of {VOCAB_SIZE}")
    return tokenizer


def make_documents(
    lines: list[list[int]], newline: list[int], rng: random.Random
) -> list[list[int]]:
    """Group consecutive tokenized lines into shuffled documents of varied length."""
    documents, start = [], 0
    while start < len(lines):
        stop = start + rng.choice(LINES_PER_DOCUMENT)
        document = [BOS_ID, *lines[start]]
        for line in lines[start + 1 : stop]:
            document += newline + line
        documents.append([*document, EOS_ID])
        start = stop
    rng.shuffle(documents)
    return documents


def pack_rows(documents: list[list[int]]) -> torch.Tensor:
    """Fill rows of the maximum length; each starts with a document, the last one is cut."""
    rows: list[list[int]] = []
    row: list[int] = []
    for document in documents:
        row += document
        if len(row) >= MAX_LENGTH:
            rows.append(row[:MAX_LENGTH])
            row = []
    return torch.tensor(rows)


def batches(
    lines: list[list[int]], newline: list[int], steps: int, seed: int
) -> Iterator[torch.Tensor]:
    """Yield training batches, regrouping the lines into new documents every epoch."""
    rng = random.Random(seed)
    done = 0
    while done < steps:
        rows = pack_rows(make_documents(lines, newline, rng))
        for batch in rows.split(BATCH_ROWS)[: steps - done]:
            done += 1
            yield batch


def target_config() -> LlamaConfig:
    """Return the target's configuration (about 1.5M parameters)."""
    return tiny_config(hidden=160, intermediate=448, layers=4, heads=8, kv_heads=4, head_dim=32)


def draft_config() -> LlamaConfig:
    """Return the draft's configuration (about 0.2M parameters)."""
    return tiny_config(hidden=64, intermediate=256, layers=2, heads=4, kv_heads=2, head_dim=16)


def tiny_config(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int
) -> LlamaConfig:
    """Return a Llama configuration with what both models share filled in."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )


def logits_of(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Return the model's logits for every position of ``ids``."""
    return model(input_ids=ids, use_cache=False).logits


def cross_entropy(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean next-token loss of ``logits`` on the text ``ids``."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def distillation(logits: torch.Tensor, target: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean KL divergence from the target's distribution to that of ``logits``."""
    with torch.no_grad():
        goal = functional.log_softmax(logits_of(target, ids), dim=-1).flatten(0, 1)
    log_q = functional.log_softmax(logits, dim=-1).flatten(0, 1)
    return functional.kl_div(log_q, goal, reduction="batchmean", log_target=True)


def learning_rate_factor(step: int, steps: int) -> float:
    """Return a linear warm-up followed by a cosine decay to 2% of the peak."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))


def make_optimizers(model: LlamaForCausalLM, peak: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the hidden matrices and AdamW for the embedding and the norms."""
    hidden: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_hidden = parameter.ndim == 2 and "embed" not in name
        (hidden if is_hidden else rest).append(parameter)
    return [
        torch.optim.Muon(hidden, lr=peak, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=peak, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(
    model: LlamaForCausalLM,
    data: Iterator[torch.Tensor],
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    steps: int,
) -> None:
    """Minimise ``loss_of(logits, ids)`` over ``steps`` batches."""
    optimizers = make_optimizers(model, PEAK_LEARNING_RATE)
    model.train()
    started = time.monotonic()
    for step, ids in enumerate(data):
        rate = PEAK_LEARNING_RATE * learning_rate_factor(step, steps)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = logits_of(model, ids)
        loss = loss_of(logits.float(), ids)
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            seconds = time.monotonic() - started
            print(f"step {step + 1}/{steps} loss {loss.item():.3f} {seconds:.0f}s", flush=True)
    model.eval()


def sample(model: LlamaForCausalLM, rows: int) -> torch.Tensor:
    """Sample ``rows`` texts from ``<s>`` at temperature 1; ended texts are padded by ``</s>``."""
    prompts = torch.full((rows, 1), BOS_ID)
    return model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_length=SAMPLE_LENGTH,
        do_sample=True,
        top_k=0,
        pad_token_id=EOS_ID,
    )


def continue_greedily(model: LlamaForCausalLM, prompts: torch.Tensor) -> torch.Tensor:
    """Return the prompts with their greedy continuations."""
    return model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_length=SAMPLE_LENGTH,
        do_sample=False,
        pad_token_id=EOS_ID,
    )


@torch.no_grad()
def agreement(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, ids: torch.Tensor, skip: int = 0
) -> tuple[float, float]:
    """Return mean sum_x min(p, q) and the rate of equal argmax over contexts that go on."""
    live = ids[:, skip:-1] != EOS_ID
    p = logits_of(target, ids)[:, skip:-1][live].softmax(-1)
    q = logits_of(draft, ids)[:, skip:-1][live].softmax(-1)
    overlap = torch.minimum(p, q).sum(-1).mean().item()
    equal = (p.argmax(-1) == q.argmax(-1)).float().mean().item()
    return overlap, equal


@torch.no_grad()
def measure(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, held_out: torch.Tensor, samples: torch.Tensor
) -> dict[str, float]:
    """Return the losses on held-out text and the acceptance measured on generated text."""
    alpha, argmax_equal = agreement(target, draft, samples)
    greedy_ids = continue_greedily(target, held_out[:, :PROMPT_LENGTH])
    _, greedy_equal = agreement(target, draft, greedy_ids, skip=PROMPT_LENGTH - 1)
    draft_logits = logits_of(draft, held_out)
    return {
        "target_parameters": target.num_parameters(),
        "draft_parameters": draft.num_parameters(),
        "target_held_out_loss": cross_entropy(logits_of(target, held_out), held_out).item(),
        "draft_held_out_loss": cross_entropy(draft_logits, held_out).item(),
        "draft_held_out_kl": distillation(draft_logits, target, held_out).item(),
        "alpha": alpha,
        "argmax_agreement_on_samples": argmax_equal,
        "argmax_agreement_on_greedy_texts": greedy_equal,
        "samples_ended": (samples[:, -1] == EOS_ID).float().mean().item(),
        "mean_sample_length": (samples != EOS_ID).sum(1).float().mean().item(),
    }


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write one Hugging Face checkpoint, tokenizer included."""
    model.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True, help="text file, one verse per line")
    parser.add_argument("--out", type=Path, required=True, help="folder for target/ and draft/")
    parser.add_argument("--steps", type=int, default=1300, help="training steps of the target")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def encode_lines(tokenizer: Tokenizer, texts: list[str]) -> tuple[list[list[int]], list[int]]:
    """Return the token ids of every line, and those of a newline."""
    encodings = tokenizer.encode_batch([*texts, "\n"], add_special_tokens=False)
    *lines, newline = [encoding.ids for encoding in encodings]
    return lines, newline


def hold_out(lines: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Split off a block of consecutive lines from the middle: (training, held-out) lines."""
    start = len(lines) // 2
    stop = start + len(lines) // 40
    return lines[:start] + lines[stop:], lines[start:stop]


def train_pair(
    lines: list[list[int]], newline: list[int], steps: int, seed: int
) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """Train the target on the corpus, then the draft on the target's distribution."""
    target = LlamaForCausalLM(target_config())
    train(target, batches(lines, newline, steps, seed + 1), cross_entropy, steps)
    draft = LlamaForCausalLM(draft_config())
    draft_steps = max(1, steps // DRAFT_STEPS_DIVISOR)
    data = batches(lines, newline, draft_steps, seed + 2)
    train(draft, data, lambda logits, ids: distillation(logits, target, ids), draft_steps)
    return target, draft


def main() -> None:
    """Train, save and measure the pair."""
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    texts = arguments.corpus.read_text(encoding="utf-8").splitlines()
    tokenizer = train_tokenizer(texts)
    lines, newline = encode_lines(tokenizer, texts)
    training, held_out = hold_out(lines)

    target, draft = train_pair(training, newline, arguments.steps, arguments.seed)
    for model, name in ((target, "target"), (draft, "draft")):
        save(model, tokenizer, arguments.out / name)

    rows = pack_rows(make_documents(held_out, newline, random.Random(arguments.seed)))
    samples = sample(target, rows=256)
    for ids in samples[:5].tolist():
        print(repr(tokenizer.decode(ids)))
    print(json.dumps(measure(target, draft, rows[:HELD_OUT_ROWS], samples), indent=2))


if __name__ == "__main__":
    main()
