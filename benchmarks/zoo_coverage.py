"""Can every family of timm that the paper's Figure 3 draws be measured, and are the numbers right?

    python benchmarks/zoo_coverage.py                       # all; a few minutes on one core
    python benchmarks/zoo_coverage.py 'levit*' --json found.jsonl

Each model is built with random weights and 8 outputs, at the smallest image size that it takes.
Two images are measured together, exactly (`probe`) and as `flatlens zoo` does it (`sketch`), and
the first of them once more by brute force: float64, one plain backward pass per output onto the
image and all parameters. The table goes to docs/zoo-coverage.md; `--json` keeps what was measured,
and a second start goes on from there.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
import warnings
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import flatlens as fl
from flatlens.training.timm_models import family, timm, uncached

OUTPUTS, DIRECTIONS = 8, 4
SIZES = (32, 48, 64, 96, 128, 160, 192, 224, 240, 256)
DOCUMENT = Path(__file__).parents[1] / "docs" / "zoo-coverage.md"
NAMES = """
    vit_tiny_patch16_224 vit_small_patch32_224 vit_wee_patch16_reg1_gap_256
    vit_pwee_patch16_reg1_gap_256 vit_little_patch16_reg4_gap_256 vit_xsmall_patch16_clip_224
    vit_small_patch14_dinov2 vit_small_patch14_reg4_dinov2 vit_tiny_r_s16_p8_224
    vit_small_r26_s32_224 vit_small_resnet26d_224 vit_relpos_small_patch16_224
    vit_relpos_small_patch16_rpn_224 vit_srelpos_small_patch16_224 vit_small_patch16_rope_224
    vit_small_patch16_rope_mixed_224 vit_small_patch16_rope_ape_224 vit_pe_core_tiny_patch16_384
    vit_tiny_patch16_dinov3_qkvb flexivit_small levit_128s levit_128 levit_conv_128s fastvit_t8
    fastvit_sa12 fastvit_mci0 mobilevit_xxs mobilevit_xs mobilevitv2_050 mobilevitv2_075
    crossvit_tiny_240 crossvit_9_240 crossvit_9_dagger_240 maxvit_pico_rw_256
    maxvit_rmlp_pico_rw_256 maxvit_tiny_tf_224 maxxvit_rmlp_nano_rw_256 maxxvitv2_nano_rw_256
    efficientvit_b0 efficientvit_b1 efficientvit_m0 efficientvit_m1 tiny_vit_5m_224 gcvit_xxtiny
    gcvit_xtiny repvit_m0_9 repvit_m1 vitamin_small_224 mvitv2_tiny mvitv2_small_cls davit_tiny
    convit_tiny nextvit_small shvit_s1 shvit_s2
    deit_tiny_patch16_224 deit_tiny_distilled_patch16_224 deit3_small_patch16_224
    eva02_tiny_patch14_224
    """
MODELS: dict[str, dict[str, Any]] = {name: {} for name in NAMES.split()}
MODELS |= {  # these exist only in one large size: take two blocks
    "samvit_base_patch16_224": {"depth": 2, "global_attn_indexes": (1,)},
    "beit_base_patch16_224": {"depth": 2},
    "beitv2_base_patch16_224": {"depth": 2},
    "naflexvit_base_patch16_gap": {"depth": 2},
    "naflexvit_base_patch16_map": {"depth": 2},
}


def build(name: str, options: dict[str, Any]) -> tuple[nn.Module, int]:
    """Build a model at the smallest image size that it accepts; sizes are tried on shapes alone."""
    reason = ""
    for size in SIZES:
        for sized in ({"img_size": size}, {}):
            try:
                with torch.device("meta"):
                    made(name, {**sized, **options}, size)
                torch.manual_seed(0)
                return made(name, {**sized, **options}, size), size
            except Exception as error:  # it knows no img_size, or not this one
                reason = f"{type(error).__name__}: {error}"
    raise RuntimeError(f"no size works: {reason}")


def made(name: str, options: dict[str, Any], size: int) -> nn.Module:
    model = uncached(timm().create_model(name, num_classes=OUTPUTS, **options).eval())
    with torch.no_grad():
        f = model(torch.randn(2, 3, size, size))
    assert f.shape == (2, OUTPUTS)
    assert f.is_meta or bool(f.isfinite().all())
    return model


def brute_force(model: nn.Module, x: Tensor) -> dict[str, float]:
    """Compute S, adaptive sharpness and MLS of the first image by one backward pass per output.

    The model runs in float64 if it can. The second image is there because torch's backward pass of
    batch norm can be wrong for one alone (torch 2.13 on the CPU, gradient channels last).
    """
    try:
        wide = copy.deepcopy(model).double()
        image = x.double().requires_grad_()
        f = torch.sigmoid(wide(image))
        model, x = wide, image
    except RuntimeError:
        x = x.clone().requires_grad_()
        f = torch.sigmoid(model(x))
    parameters = [p for p in model.parameters() if p.requires_grad]
    S, adaptive, rows = 0.0, 0.0, []
    for v in range(f.shape[1]):
        grads = torch.autograd.grad(f[0, v], [x, *parameters], retain_graph=True, allow_unused=True)
        rows.append(grads[0][0].flatten())
        for p, g in zip(parameters, grads[1:], strict=True):
            if g is not None:
                S += float(g.square().sum())
                adaptive += float((p.detach() * g).square().sum())
    singular = torch.linalg.svdvals(torch.stack(rows))
    return {"sharpness": S, "adaptive_sharpness": adaptive, "mls": float(singular[0])}


def first(p: fl.Probe) -> dict[str, float]:
    """Return the same numbers of the first image from a probe."""
    return {
        name: float(getattr(fl, name).samples(p)[0])
        for name in ("sharpness", "adaptive_sharpness", "mls")
    }


def measure(name: str, options: dict[str, Any]) -> dict[str, Any]:
    model, size = build(name, options)
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    start = time.perf_counter()
    exact = fl.probe(model, x, output=torch.sigmoid, chunk=2)
    seconds = time.perf_counter() - start
    start = time.perf_counter()
    sketched = fl.sketch(
        model, x, output=torch.sigmoid, directions=DIRECTIONS, layers=False, top=1,
        tolerance=1e-4, chunk=2,
    )  # fmt: skip
    sketch_seconds = time.perf_counter() - start
    true, found, lanczos = brute_force(model, x), first(exact), first(sketched)
    assert sketched.sketch is not None
    error = sketched.sketch.errors["sharpness"]
    return {
        "model": name,
        "family": family(name),
        "options": options,
        "size": size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "paths": dict(Counter(q.path for q in exact.parameters)),
        "unused": [q.name for q in exact.parameters if q.path == "unused"],
        "slow": [q.name for q in exact.parameters if q.path == "slow"],
        "notes": exact.notes,
        "off": {k: abs(found[k] / true[k] - 1) for k in true},
        "lanczos_off": abs(lanczos["mls"] / true["mls"] - 1),
        "sketch_sigmas": abs(fl.sharpness(sketched) - fl.sharpness(exact)) / max(error, 1e-300),
        "seconds": seconds,
        "sketch_seconds": sketch_seconds,
    }


def document(rows: list[dict[str, Any]]) -> str:
    good = [r for r in rows if "error" not in r]
    bad = [r for r in rows if "error" in r]
    matching = [r for r in good if "vit" in r["model"]]
    worst = {k: max(r["off"][k] for r in good) for k in good[0]["off"]}
    lines = [
        "# Which models of timm can be measured",
        "",
        f"All {len(good)} models of {len({r['family'] for r in good})} families below can be "
        "measured. The numbers agree with",
        "brute force.",
        "",
        "| largest relative difference over all models | |",
        "|---|--:|",
        *(f"| {k} | {v:.1e} |" for k, v in worst.items()),
        f"| MLS by Lanczos | {max(r['lanczos_off'] for r in good):.1e} |",
        "",
        "How it was taken:",
        "",
        "| setting | value |",
        "|---|---|",
        f"| models that match `*vit*` | {len(matching)} of "
        f"{len({r['family'] for r in matching})} families |",
        f"| networks | random weights, {OUTPUTS} outputs behind a sigmoid, float32 |",
        "| images | two, measured together, at the smallest size each model takes |",
        "| brute force | on the first image, in float64, one plain backward pass per output |",
        "| command | `python benchmarks/zoo_coverage.py` |",
        "",
        "What the columns say:",
        "",
        "| column | what |",
        "|---|---|",
        "| layer | parameter tensors that are weights of measured layers |",
        "| rule | parameter tensors with a fast rule |",
        "| slow | parameter tensors whose samples are measured one at a time; the numbers are "
        "exact |",
        "| unused | parameter tensors that the output does not use |",
        "| off | largest relative difference of S, adaptive sharpness and MLS from brute force |",
        "| exact s, sketch s | seconds of the exact pass and of the sketch that `flatlens zoo` "
        "takes, two images, one core of a busy machine |",
        "",
        "Some modules keep what they looked up in a table of attention biases: LeViT, EfficientViT",
        "of MSRA, and TinyViT in evaluation mode. That cache hides the table from derivatives.",
        "`flatlens zoo` takes the cache away (`timm_models.uncached`). Standardised convolutions",
        "(the hybrids) go the slow way. So do tables that are indexed, concatenated or split",
        "before use.",
        "",
        "| model | family | pixels | parameters | layer | rule | slow | unused | off | exact s "
        "| sketch s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in sorted(good, key=lambda r: (r["family"], r["model"])):
        paths = [str(r["paths"].get(k, 0)) for k in ("layer", "rule", "slow", "unused")]
        depth = "".join(f" {k}={v}" for k, v in r["options"].items() if k == "depth")
        lines.append(
            f"| {r['model']}{depth} | {r['family']} | {r['size']} | {r['parameters']:,} | "
            f"{' | '.join(paths)} | {max(*r['off'].values(), r['lanczos_off']):.0e} | "
            f"{r['seconds']:.1f} | {r['sketch_seconds']:.1f} |"
        )
    notes = {r["model"]: r for r in good if r["slow"] or r["unused"]}
    if notes:
        lines += ["", "## What takes the slow way, or is not used", ""]
        lines += ["| model | path | parameters |", "|---|---|---|"]
        for name, r in sorted(notes.items()):
            for kind in ("slow", "unused"):
                if r[kind]:
                    few = ", ".join(f"`{n}`" for n in r[kind][:3])
                    more = f" and {len(r[kind]) - 3} more" if len(r[kind]) > 3 else ""
                    lines.append(f"| {name} | {kind} | {few}{more} |")
    if bad:
        lines += ["", "## Not measured", ""]
        lines += [f"- {r['model']}: {r['error']}" for r in bad]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pattern", nargs="?", default="*")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    done: dict[str, dict[str, Any]] = {}
    if arguments.json is not None and arguments.json.exists():
        lines = arguments.json.read_text().splitlines()
        done = {row["model"]: row for row in map(json.loads, lines) if "error" not in row}
    for name, options in MODELS.items():
        if name in done or not fnmatch(name, arguments.pattern):
            continue
        try:
            row = measure(name, options)
        except Exception as error:
            row = {"model": name, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
        done[name] = row
        shown = row.get("error") or (row["size"], row["paths"], row["off"], row["lanczos_off"])
        print(name, shown, flush=True)
        if arguments.json is not None:
            with arguments.json.open("a") as file:
                file.write(json.dumps(row) + "\n")
    if arguments.pattern == "*":
        DOCUMENT.write_text(document([done[name] for name in MODELS if name in done]))


if __name__ == "__main__":
    main()
