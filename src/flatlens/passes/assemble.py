"""Assemble a Probe from the table of columns."""

from __future__ import annotations

import numpy as np

from flatlens.algebra.operator_norms import weight_norms
from flatlens.passes.columns import ColumnTable, complete
from flatlens.passes.names import layer_names
from flatlens.probes import (
    PATHS,
    Array,
    FirstLayerProbe,
    InputProbe,
    LayerProbe,
    ParameterProbe,
    Probe,
)


def assemble(table: ColumnTable, weight_norm: str, M: int, chunk: int) -> Probe:
    """Put the numbers of all samples into a Probe.

    Args:
        table: the numbers.
        weight_norm: which norm is ``LayerProbe.norm``.
        M: entries of the network's input per sample.
        chunk: samples at a time.
    """
    arrays, n, start = table.arrays(), table.n, table.chunks[0]
    names = layer_names([facts.layer for facts in start.layers], table.subject)
    if ("input",) not in arrays:  # sharpness alone
        arrays["input",] = {
            "singular": np.full((n, 1), np.nan),
            "rank": np.full(n, -1),
        }
    f = arrays["output",][""]
    return Probe(
        n=n,
        N=f.shape[1],
        M=M,
        dtype=table.subject.dtype,
        output=f,
        input=InputProbe(**complete("input", arrays["input",], n)),
        layers=[
            _layer(table, i, name, arrays["layer", i], weight_norm) for i, name in enumerate(names)
        ],
        parameters=[
            ParameterProbe(
                name=name,
                numel=p.numel(),
                path=max((c.paths[name] for c in table.chunks), key=PATHS.index),
                **complete("parameter", arrays["parameter", name], n),
            )
            for name, p in table.subject.named
        ],
        first=_first(table, arrays.get(("first",), {})),
        chunk=chunk,
        unmeasured=list(dict.fromkeys(name for c in table.chunks for name in c.unmeasured)),
    )


def _first(table: ColumnTable, arrays: dict[str, Array]) -> FirstLayerProbe | None:
    weight = table.chunks[0].first_weight
    if weight is None:
        return None
    means = {name: total.div_(table.n).cpu().numpy() for name, total in table.sums.items()}
    return FirstLayerProbe(weight=weight.double().cpu().numpy(), **arrays, **means)


def _layer(
    table: ColumnTable, i: int, name: str, arrays: dict[str, Array], weight_norm: str
) -> LayerProbe:
    chunks = [chunk.layers[i] for chunk in table.chunks]
    facts, layer = chunks[0], chunks[0].layer
    owned = {id(p): n for n, p in table.subject.named}
    norms = weight_norms(layer)
    groups, d_out, d_in = layer.matrix.shape
    fewest, most = layer.reads()
    return LayerProbe(
        name=name,
        kind=layer.kind,
        weight=owned.get(id(layer.weight)),
        bias=owned.get(id(layer.bias)),
        has_bias=layer.bias is not None,
        bias_counts=all(c.bias_counts for c in chunks),
        positions=facts.positions,
        groups=groups,
        in_features=d_in,
        out_features=d_out,
        M=facts.M,
        reads_input=all(c.reads_input for c in chunks),
        norms=norms,
        norm=getattr(norms, weight_norm),
        kappa=most,
        fewest=fewest,
        is_output=all(c.is_output for c in chunks),
        **complete("layer", arrays, table.n),
    )
