"""From loss flatness to compressed representations: the whole idea for an MLP, torch alone.

f = W_L φ(… φ(W₁ x + b₁) …) + b_L maps ℝᴹ to ℝᴺ. Layer l sees xˡ and computes zˡ = W_l xˡ + b_l.
All that is needed is Jˡ = ∂f/∂zˡ, one N × d_out matrix per sample and layer, because (Eq. 4)

    f depends on xˡ, W_l and b_l only through zˡ, and dz = W_l dx + dW_l x + db_l, hence
    ∇ₓf = J W                                how the representation moves with the input,
    ∇_W f = J ⊗ x, so ‖∇_W f‖_F = ‖J‖_F ‖x‖   how the output moves with the weights: sharpness.

The same J stands in both, so a flat loss (small J) forces compression (small J W):

    ‖∇ₓf‖₂ = ‖J W‖₂ ≤ ‖W‖₂ ‖J‖_F = ‖W‖₂ ‖∇_W f‖_F / ‖x‖₂.                          (5)

Run me: `python minimal.py`. The package does the same for any network (tests hold both equal).
"""

import torch
from torch import Tensor, nn

Layer = tuple[nn.Linear, Tensor, Tensor]  # the layer, its input xˡ [n, d_in], Jˡ [n, N, d_out]


def jacobians(net: nn.Sequential, x: Tensor) -> tuple[Tensor, list[Layer]]:
    """∇ₓf [n, N, M], and the linear layers with their inputs and Jacobians.

    One forward pass and N backward passes. Samples do not mix, so that the derivative of
    Σ_i f_v(x_i) with respect to sample i's activations is the derivative of f_v(x_i).
    """
    linears = [m for m in net if isinstance(m, nn.Linear)]
    others = [m for m in net if not isinstance(m, nn.Linear) and list(m.parameters())]
    if others or len(set(linears)) < len(linears):
        raise ValueError("minimal.py knows linear layers, each used once, and activations.")
    if not linears or not all(p.requires_grad for p in net.parameters()):
        raise ValueError("minimal.py wants at least one linear layer and no frozen parameter.")
    x = h = x.detach().requires_grad_()
    inputs, zs = [], []
    for module in net:
        if isinstance(module, nn.Linear):
            inputs.append(h.detach())
            h = module(h)
            zs.append(h)
            h = h.clone()  # an in-place activation may overwrite h, never z
        else:
            h = module(h)
    rows = [torch.autograd.grad(f_v.sum(), [x, *zs], retain_graph=True) for f_v in h.unbind(1)]
    grad_x, *js = (torch.stack(parts, dim=1).flatten(2) for parts in zip(*rows, strict=True))
    return grad_x, list(zip(linears, inputs, js, strict=True))


def spectrum(a: Tensor) -> Tensor:
    """Singular values [n, min(N, M)] of a [n, N, M] in float64, largest first.

    What is below eps · max(N, M) · σ₁ is rounding, not a direction: it becomes exactly 0, and
    with it the volume, instead of a number made of noise.
    """
    sigma = torch.linalg.svdvals(a.double())
    noise = torch.finfo(a.dtype).eps * max(a.shape[1:]) * sigma[:, :1]
    return torch.where(sigma < noise, 0.0, sigma)


def dimension(sigma: Tensor) -> Tensor:
    """Participation ratio (Tr C)² / Tr C² of C = ∇ₓf ∇ₓfᵀ, with eigenvalues σ² (Eq. 15)."""
    lam = (sigma / sigma[:, :1]) ** 2  # scale-free, so nothing overflows
    return lam.sum(1) ** 2 / (lam**2).sum(1)


def measure(net: nn.Sequential, x: Tensor) -> dict[str, float]:
    """Sharpness, compression, and both sides of Eqs. 11 and 12, at the samples x [n, M].

    >>> net = nn.Sequential(nn.Linear(2, 2, bias=False))
    >>> net[0].weight.data = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    >>> m = measure(net, torch.tensor([[1.0, 0.0]]))
    >>> m["mls"], m["volume"], m["sharpness"]  # σ = (4, 3); ‖I ⊗ x‖² = N ‖x‖²
    (4.0, 12.0, 2.0)
    >>> m["eq11.lhs"] <= m["eq11.rhs"]
    True
    """
    grad_x, layers = jacobians(net, x)
    n = len(x)
    sharpness = ratios = torch.zeros(n, dtype=torch.float64)  # per sample; means come last
    nmls = network_volume = torch.zeros(n, dtype=torch.float64)
    for linear, x_l, j in layers:
        x2 = x_l.double().square().sum(1)  # ‖xˡ‖²
        j2 = j.double().square().sum((1, 2))  # ‖Jˡ‖_F²
        # ‖∇_W f‖_F² + ‖∇_b f‖_F² = ‖J‖_F² ‖x‖² + ‖J‖_F², since ∂z/∂b = I
        sharpness = sharpness + j2 * (x2 + (linear.bias is not None))
        # ∇_{xˡ}f = Jˡ W_l (Eq. 4), in the precision of the network
        sigma_l = spectrum(j @ linear.weight.detach())
        nmls = nmls + sigma_l[:, 0]
        network_volume = network_volume + sigma_l.prod(1)
        # Σ_l ‖W_l‖₂² / ‖xˡ‖², the data side of Eq. 12
        ratios = ratios + norm2(linear) ** 2 / x2

    sigma = spectrum(grad_x)
    s = sharpness.mean()
    first, x_1, _ = layers[0]
    means = {
        # Eq. 3: S = 1/n Σ_i ‖∇_θ f(x_i)‖_F². At zero loss this is the trace of the Hessian of
        # 1/n Σ_i ½‖f - y‖²: ∇²(½‖f - y‖²) = ∇fᵀ∇f + Σ_v (f_v - y_v) ∇²f_v, and f = y.
        "sharpness": s,
        # Definitions 3.7 and 3.9: mean over samples of ‖∇ₓf‖₂; summed over the layers
        "mls": sigma[:, 0].mean(),
        "nmls": nmls.mean(),
        # Eq. 7: dVol = √det(∇ₓf ∇ₓfᵀ) = Π σ, and Definitions 3.3, 3.5
        "volume": sigma.prod(1).mean(),
        "log_volume": sigma.log().sum(1).mean(),
        "network_volume": network_volume.mean(),
        "local_dimension": dimension(sigma).mean(),
        # Eq. 11. Mean of Eq. 5, then Cauchy-Schwarz (1/n Σ a_i b_i)² ≤ 1/n Σ a_i² · 1/n Σ b_i²
        # with a = 1/‖x‖, b = ‖∇_W f‖_F, then ‖∇_W f‖_F ≤ ‖∇_θ f‖_F.
        "eq11.lhs": sigma[:, 0].mean(),
        "eq11.rhs": norm2(first) * (1 / x_1.double().square().sum(1)).mean().sqrt() * s.sqrt(),
        # Eq. 12. The same with sums over (i, l): a = ‖W_l‖₂/‖xˡ‖, b = ‖∇_{W_l} f‖_F, and
        # Σ_l ‖∇_{W_l} f‖_F² ≤ ‖∇_θ f‖_F², which is all that is lost by it (the biases).
        "eq12.lhs": nmls.mean(),
        "eq12.rhs": ratios.mean().sqrt() * s.sqrt(),
    }
    return {name: value.item() for name, value in means.items()}


def norm2(linear: nn.Linear) -> Tensor:
    """‖W‖₂, the largest singular value."""
    sigma: Tensor = torch.linalg.svdvals(linear.weight.detach().double())
    return sigma[0]


if __name__ == "__main__":
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 5)
    )
    for name, value in measure(net, torch.randn(100, 20)).items():
        print(f"{name:16} {value:.6g}")
