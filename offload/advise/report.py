"""Shows advice: a table of limits with their plans, what was measured and assumed, and the lines to paste."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offload.advise.forms import FormAdvice
from offload.advise.outline import Outline
from offload.advise.prediction import Advice, Situation, bound_of
from offload.advise.sources import blocks_of, names_of_layers
from offload.planning.byte_forms import ByteForm
from offload.telemetry.memory_report import describe

__all__ = ["Report"]

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_NAMES = {
    "given": "--memory",
    "least": "the least",
    "double": "twice --memory",
    "all": "all of use",
}


def size(nbytes: float) -> str:
    """Bytes in words."""
    for unit, factor in _UNITS:
        if nbytes >= factor:
            return f"{nbytes / factor:,.1f} {unit}"
    return f"{nbytes:,.0f} bytes"


@dataclass(frozen=True)
class Report:
    """The result of ``python -m offload.advise``."""

    what: str
    outline: Outline
    situation: Situation
    advices: Sequence[tuple[str, Advice]]
    tokens: int
    positions: int
    #: Arguments of the lines to paste, as Python.
    device: str
    home: str
    memory: str
    param_dtype: str | None
    optimizer: str
    #: Free bytes of the memory that layers compute in, and of the disk.
    free_bytes: int
    disk_free_bytes: int
    #: Where the disk bounds the plan: the first as it is, the others in fewer bytes.
    forms: Sequence[FormAdvice] = ()

    @property
    def home_bytes(self) -> int:
        """Bytes of all files: weights, gradients, optimizer states."""
        shards = self.situation.shards
        return sum(shards.home_bytes) + sum(shards.gradient_bytes) + sum(shards.state_bytes(self._states))

    @property
    def _states(self) -> float:
        return self.situation.optimizer.states

    @property
    def lines(self) -> list[str]:
        """Python that makes model and optimizer, with the least memory where the given one is too small."""
        return self.lines_in(self.situation.shards.form)

    def lines_in(self, form: ByteForm) -> list[str]:
        """The same for a model that is stored in this form."""
        named = dict(self.advices)
        fits = named["given"].prediction is not None
        memory = self.memory if fits else f"{-(-named['least'].limit_bytes >> 20)}MiB"
        preparation = self.outline.preparation or ["from offload import OffloadModel, OffloadOptimizer"]
        lines = [*([] if "import torch" in preparation else ["import torch"]), *preparation]
        path, make = self.outline.path, "OffloadModel"
        arguments = f'{"layers" if path is None else repr(path)}, "{self.device}", {self.home!r}, memory={memory!r}'
        if len(self.situation.rows) > 1:
            arguments += f", num_microbatches={len(self.situation.rows)}"
        if self.param_dtype is not None:
            arguments += f", param_dtype={self.param_dtype}"
        if path is not None:
            make += ".from_pretrained"
            arguments += f", blocks={blocks_of(self.outline)!r}"
            if not self.outline.has_class:
                lines.append("# build: a function without arguments that makes the model of these files")
                arguments += ", model=build"
        elif self.outline.modules is None:
            lines.append(f"# layers: a list of {len(self.outline.layers)}: {names_of_layers(self.outline)}")
        if not fits:
            lines.append(f"# {self.memory} is too little: this is the least")
        of_model, of_optimizer = (
            f", {text}" if text else "" for text in (form.model_arguments, form.optimizer_arguments)
        )
        lines.append(f"model = {make}({arguments}{of_model})")
        lines.append(f"optimizer = OffloadOptimizer(model, torch.optim.{self.optimizer}{of_optimizer}, lr=1e-3)")
        return lines

    def fields(self) -> dict[str, Any]:
        """For machines. Sizes are bytes, times seconds, rates per second."""
        return {
            "what": self.what,
            "parameters": self.outline.elements,
            "layers": len(self.outline.layers),
            "shards": len(self.situation.shards.layers),
            "tokens": self.tokens,
            "positions": self.positions,
            "microbatch_rows": list(self.situation.rows),
            "home_bytes": self.home_bytes,
            "disk_free_bytes": self.disk_free_bytes,
            "free_bytes": self.free_bytes,
            "shards_in_host_memory": None if self.situation.on_host else len(self.situation.resting),
            "rates": self.situation.rates.fields(),
            "optimizer": {
                "name": self.optimizer,
                "states": self.situation.optimizer.count,
                "stored_as": self.situation.optimizer.stored_as,
                "bytes_per_second": self.situation.optimizer.bytes_per_second,
            },
            "limits": [self._fields_of(name, advice) for name, advice in self.advices],
            "forms": [self._fields_of_form(each) for each in self.forms],
            "assumptions": self.outline.assumptions,
            "lines": self.lines,
        }

    def _fields_of_form(self, each: FormAdvice) -> dict[str, Any]:
        return {
            "store_dtype": each.form.weights,
            "gradient_dtype": each.form.gradients,
            "states": each.form.states,
            "seconds": each.advice.seconds,
            "moved_bytes": each.moved_bytes,
            "home_bytes": each.home_bytes,
            "lines": self.lines_in(each.form),
        }

    def _fields_of(self, name: str, advice: Advice) -> dict[str, Any]:
        found: dict[str, Any] = {"name": name, "limit_bytes": advice.limit_bytes, "fits": advice.prediction is not None}
        if (prediction := advice.prediction) is not None:
            choice = prediction.choice
            found |= {
                "memory_bytes": advice.memory_bytes,
                "seconds": advice.seconds,
                "tokens_per_second": self.tokens / advice.seconds,
                "bound": bound_of(self.situation, advice),
                "slots": choice.slots,
                "shards_in_memory": len(choice.in_memory),
                "graphs_kept": len(choice.kept),
                "gradients_waiting": len(choice.waiting),
            }
        return found

    def __str__(self) -> str:
        rates, shards = self.situation.rates, self.situation.shards
        largest = max(shards.slot_bytes)
        lines = [
            f"{self.what}: {self.outline.elements:,} parameters, {len(shards.layers)} shards of at most "
            f"{size(largest)}; {self.tokens:,} tokens a step in rows of {self.positions:,}",
            f"home: {size(self.home_bytes)} of files (parameters, gradients, {self.situation.optimizer.described}); "
            f"{size(self.disk_free_bytes)} free in {self.home}"
            + ("" if self.home_bytes <= self.disk_free_bytes else ", which is too little"),
            f"measured here: {rates.flops / 1e9:,.0f} Gflop/s ({rates.flops_float32 / 1e9:,.0f} in float32), "
            f"read {rates.read_bytes / 1e9:.2f} GB/s, write {rates.write_bytes / 1e9:.2f} GB/s "
            f"({'direct' if rates.direct else 'page cache'}), memory {rates.touched_bytes / 1e9:.1f} GB/s, "
            f"{self.optimizer} {self.situation.optimizer.bytes_per_second / 1e9:.2f} GB/s of gradients",
            *self._host_line(),
            "",
            *self._table(),
            "",
            *self._form_table(),
            *(f"assumed: {assumption}" for assumption in self.outline.assumptions),
            "assumed: without your loss, and with nothing else running",
            "",
            *self.lines,
        ]
        return "\n".join(lines)

    def _host_line(self) -> list[str]:
        """Beside a device: what rests in host memory."""
        situation = self.situation
        if situation.host_bytes is None:
            return []
        count, nbytes = len(situation.resting), sum(situation.resting.values())
        return [
            f"host memory: {count} of {len(situation.shards.layers)} shards rest there, {size(nbytes)} of "
            f"{size(situation.host_bytes)} that may be used"
        ]

    def _table(self) -> list[str]:
        cells = [("memory", "", "s/step", "tokens/s", "bound by", "plan")]
        for name, advice in self.advices:
            limit = size(advice.limit_bytes)
            if advice.prediction is None:
                cells.append((limit, _NAMES[name], "-", "-", "-", f"does not fit; {self._short(advice)}"))
                continue
            plan = describe(advice.prediction.choice)
            if advice.limit_bytes > self.free_bytes:
                plan += f"; only {size(self.free_bytes)} are free here"
            each = self.tokens / advice.seconds
            bound = bound_of(self.situation, advice)
            cells.append((limit, _NAMES[name], f"{advice.seconds:.3g}", f"{each:,.4g}", bound, plan))
        widths = [max(len(row[k]) for row in cells) for k in range(5)]
        return [
            "  ".join([row[0].rjust(widths[0]), row[1].ljust(widths[1]), *(row[k].rjust(widths[k]) for k in (2, 3))])
            + f"  {row[4].ljust(widths[4])}  {row[5]}"
            for row in cells
        ]

    def _form_table(self) -> list[str]:
        """What fewer bytes would cost, where the disk is the bound."""
        if len(self.forms) < 2:
            return []
        limit = size(self.forms[0].advice.limit_bytes)
        rows = [("s/step", "B/parameter moved", "home", "")]
        for each in self.forms:
            moved = each.moved_bytes / self.outline.elements
            rows.append((f"{each.advice.seconds:.3g}", f"{moved:.1f}", size(each.home_bytes), each.form.arguments))
        widths = [max(len(row[k]) for row in rows) for k in range(3)]
        return [
            f"the disk is the bound at {limit}; stored in fewer bytes (values are rounded: measure your accuracy):",
            *("  ".join([*(row[k].rjust(widths[k]) for k in range(3)), row[3]]).rstrip() for row in rows),
            "",
        ]

    def _short(self, advice: Advice) -> str:
        least = dict(self.advices)["least"].limit_bytes
        more = "; or fewer --tokens, or --microbatches" if least > 0 else ""
        return f"{size(least - advice.limit_bytes)} short of the least{more}"
