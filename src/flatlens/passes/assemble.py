"""Assemble a Probe from the table of columns."""

from __future__ import annotations

from flatlens.passes.columns import ColumnTable
from flatlens.passes.segments import complete
from flatlens.passes.slots import Slot
from flatlens.probes import (
    Array,
    FirstLayerProbe,
    InputProbe,
    LayerProbe,
    ParameterProbe,
    Probe,
)


def assemble(table: ColumnTable, weight_norm: str, M: int, chunk: int) -> Probe:
    """Build a Probe from the columns of all samples.

    Args:
        table: the columns of all samples.
        weight_norm: which norm is ``LayerProbe.norm``.
        M: entries of the network's input per sample.
        chunk: samples at a time.
    """
    arrays, n = table.arrays(), table.n
    f = arrays["output",][""]
    return Probe(
        n=n,
        N=f.shape[1],
        M=M,
        dtype=table.subject.dtype,
        output=f,
        input=InputProbe(**complete("input", arrays.get(("input",), {}), n)),
        layers=[
            _layer(table, slot, arrays["layer", i], weight_norm)
            for i, slot in enumerate(table.slots.all)
        ],
        parameters=[
            ParameterProbe(
                name=name,
                numel=p.numel(),
                path=table.paths[name],
                **complete("parameter", arrays.get(("parameter", name), {}), n),
            )
            for name, p in table.subject.named
        ],
        first=_first(table, arrays.get(("first",), {})),
        chunk=chunk,
        unmeasured=list(table.unmeasured),
    )


def _first(table: ColumnTable, arrays: dict[str, Array]) -> FirstLayerProbe | None:
    if not arrays:
        return None
    first_layer, n = table.first_layer, table.n
    return FirstLayerProbe(
        weight=None if first_layer.weight is None else first_layer.weight.double().cpu().numpy(),
        **complete("first", arrays, n),
        **{name: total.div_(n).cpu().numpy() for name, total in first_layer.sums.items()},
    )


def _layer(
    table: ColumnTable, slot: Slot, arrays: dict[str, Array], weight_norm: str
) -> LayerProbe:
    layer, norms = slot.layer, slot.norms()
    owned = {id(p): n for n, p in table.subject.named}
    groups, d_out, d_in = layer.matrix.shape
    fewest, most = slot.reads
    arrays = {**arrays, **slot.sample_columns(table.n, weight_norm)}
    return LayerProbe(
        name=slot.name,
        kind=layer.kind,
        weight=owned.get(id(slot.parameter)),
        bias=owned.get(id(layer.bias)),
        has_bias=layer.bias is not None,
        bias_counts=slot.bias_counts,
        positions=slot.positions,
        groups=groups,
        in_features=d_in,
        out_features=d_out,
        M=slot.entries,
        reads_input=slot.reads_input,
        norms=norms,
        norm=getattr(norms, weight_norm),
        weight_norm=weight_norm,
        kappa=most,
        fewest=fewest,
        is_output=slot.is_output,
        **complete("layer", arrays, table.n),
    )
