"""The model card that lies in the drafter's folder: how it was made and what was measured in, Markdown out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_mlx.bench.summary import all_the_way
from dflash_mlx.drafter import DraftConfig
from dflash_mlx.training.evaluate import NEW, OLD, Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """How the drafter came to be; what is not known is None and left out."""

    base: str  # the target's published name, or its folder's
    licence: str | None
    config: DraftConfig
    parameters: int
    data: Mapping[str, Any] | None  # the manifest of the answers
    training: Mapping[str, Any] | None  # options, steps, init


def model_card(made: Made, measured: Evaluation | None) -> str:
    """The README.md of a drafter's folder."""
    parts = [_front(made), f"# DFlash drafter for {made.base}\n", _introduction(made), _network(made)]
    if made.data:
        parts.append(_data(made.data))
    if made.training:
        parts.append(_training(made.training))
    if measured:
        parts += [_measured(measured), _places(measured)]
    parts.append(_licence(made))
    return "\n".join(parts)


def _front(made: Made) -> str:
    lines = [f"license: {made.licence}"] if made.licence else []
    lines += [f"base_model: {made.base}", "tags: [dflash, speculative-decoding, mlx]"]
    return "---\n" + "\n".join(lines) + "\n---\n"


def _introduction(made: Made) -> str:
    config = made.config
    return (
        f"A block-diffusion drafter that proposes {config.block_size - 1} tokens a pass for {made.base}. It changes "
        "the speed of that model and never its text: the target verifies every token. It is for these very weights, "
        "their quantisation and their chat template.\n\n"
        "```python\nfrom dflash_mlx import DFlashGenerator\n\n"
        f'runner = DFlashGenerator("{made.base}", "path/to/this/folder")\n```\n'
    )


def _network(made: Made) -> str:
    config = made.config
    windows = {config.window(layer) for layer in range(config.num_hidden_layers)}
    attention = "full attention" if windows == {None} else f"windows {sorted(map(str, windows))}"
    return _table(
        "Network",
        (
            ("format", f"z-lab v1 (`DFlashDraftModel`), {made.parameters:,} parameters"),
            ("layers", f"{config.num_hidden_layers}, hidden {config.hidden_size}, {attention}"),
            (
                "heads",
                f"{config.num_attention_heads} query, {config.num_key_value_heads} key-value, {config.head_dim} wide",
            ),
            ("block", f"{config.block_size}, the anchor included; mask token {config.mask_token_id}"),
            ("reads target layers", ", ".join(map(str, config.target_layer_ids))),
        ),
    )


def _data(manifest: Mapping[str, Any]) -> str:
    counts, recipe, target = manifest["counts"], manifest["recipe"], manifest["target"]
    drawn = counts["sampled"] / max(1, counts["answers"])
    rows = [
        ("answers", f"{counts['answers']:,} by the target itself, {counts['answer_tokens']:,} tokens"),
        ("kept from training", f"{counts['held_out']:,}"),
        ("drawn", f"{drawn:.0%} at temperature {recipe['temperature']:g}, the others greedy"),
        ("prompts", "given" if recipe["prompts"] else "made up from templates and by the target"),
        ("seed", str(recipe["seed"])),
        ("target", f"{target['name']}, weights {target['weights']}, template {target['template']}"),
        ("thinking", {True: "on", False: "off", None: "as the template has it"}[target["thinking"]]),
    ]
    classes = [
        (kind, f"{row['answers']:,} answers, {row['answer_tokens']:,} tokens")
        for kind, row in counts["by_class"].items()
    ]
    return _table("Answers", rows) + "\n" + _table(None, classes)


def _training(training: Mapping[str, Any]) -> str:
    return _table("Training", [(name.replace("_", " "), _shown(value)) for name, value in training.items()])


def _measured(measured: Evaluation) -> str:
    arms = [arm for arm in (NEW, OLD) if arm in measured.drafts]
    head = ["prompts", "answers", "plain tokens/s"]
    head += [f"{_named(arm)}{what}" for arm in arms for what in ("tokens per round", "speed-up")]
    lines = [_line(head), _line(["---"] * len(head))]
    for row in measured.rows:
        cells = [row.prompt_class, str(row.prompts), f"{row.plain_tokens_per_second:.1f}"]
        for arm in arms:
            cells += [f"{row.figures[arm].tokens_per_round:.2f}", f"{row.figures[arm].speedup:.2f}"]
        lines.append(_line(cells))
    same = sum(row.figures[NEW].identical for row in measured.rows[-1:])
    options = measured.options
    text = (
        f"Held-out prompts, greedy, {options['max_new_tokens']} tokens, {measured.dtype}, every block verified "
        "whole and any word proposed, against mlx-lm's plain decoding in turns, on "
        f"{measured.machine}. {same} of {measured.all.prompts} texts are those of plain "
        "decoding; others part where two logits are as good as equal."
    )
    if OLD in measured.drafts:
        text += f" Before: {measured.drafts[OLD]}."
    return "## Measured\n\n" + "\n".join(lines) + "\n\n" + text + "\n"


def _places(measured: Evaluation) -> str:
    lines = []
    for arm, places in measured.positions.items():
        if places:
            rates = ", ".join(f"{place.rate:.0%}" for place in places)
            whole = ", ".join(f"{chance:.0%}" for chance in all_the_way(places))
            lines.append(
                f"Place by place in the block{', before' if arm == OLD else ''}: {rates} of the proposals that were "
                f"reached are right; up to each place all are right in {whole} of the rounds."
            )
    return "\n\n".join(lines) + "\n"


def _licence(made: Made) -> str:
    stated = (
        f"{made.licence}, as {made.base}."
        if made.licence
        else "The target's files state none; see the target."
    )
    return f"## Licence\n\n{stated}\n"


def _named(arm: str) -> str:
    return "before: " if arm == OLD else ""


def _table(title: str | None, rows: Sequence[tuple[str, str]]) -> str:
    head = f"## {title}\n\n" if title else ""
    return head + "| | |\n|---|---|\n" + "\n".join(_line(row) for row in rows) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
