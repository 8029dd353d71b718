"""The baselines token by token, from their equations, with a layer's weights."""

import torch
import torch.nn.functional as F


def convolved(x, weight, bias):
    """silu of a causal depthwise convolution: (B, T, I)."""
    padded = F.pad(x.mT, (weight.shape[-1] - 1, 0))
    return F.silu(F.conv1d(padded, weight, bias, groups=weight.shape[0])).mT


def normed(x, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def mamba2(layer, x):
    sizes = [layer.inner_size, layer.conv_size, layer.num_heads]
    z, xbc, dt = layer.in_proj(x).split(sizes, -1)
    xbc = convolved(xbc, layer.conv1d.weight, layer.conv1d.bias)
    u, b, c = xbc.split([layer.inner_size, layer.state_size, layer.state_size], -1)
    u = u.unflatten(-1, (layer.num_heads, -1))
    dt = F.softplus(dt + layer.dt_bias)
    decay = torch.exp(-dt * layer.A_log.exp())
    state, ys = 0, []
    for t in range(x.shape[1]):
        write = torch.einsum("bn,bhd->bhnd", b[:, t], dt[:, t, :, None] * u[:, t])
        state = decay[:, t, :, None, None] * state + write
        ys.append(torch.einsum("bn,bhnd->bhd", c[:, t], state))
    y = torch.stack(ys, 1) + layer.D[:, None] * u
    y = normed(y.flatten(-2) * F.silu(z), layer.norm.eps) * layer.norm.weight
    return layer.out_proj(y), [state]


def mamba3(layer, x):
    sizes = [layer.inner_size, *layer.sizes]
    z, u, b, c, dt, rate, trap, angle = layer.in_proj(x).split(sizes, -1)
    u = u.unflatten(-1, (layer.num_heads, -1))
    dt, trap = F.softplus(dt + layer.dt_bias), trap.sigmoid()
    decay = torch.exp(-dt * torch.where(rate > 0, 1 + rate, 1 / (1 - rate)).clamp_min(1e-4))
    keys = normed(b, layer.B_norm.eps) * layer.B_norm.weight
    queries = normed(c, layer.C_norm.eps) * layer.C_norm.weight
    state, theta, held, ys = 0, 0, 0, []
    for t in range(x.shape[1]):
        theta = theta + torch.pi * angle[:, t, None].tanh() * dt[:, t, :, None]
        k = turned_pairs(keys[:, t, None] + layer.B_bias[:, 0], theta)
        q = turned_pairs(queries[:, t, None] + layer.C_bias[:, 0], theta)
        now, last = (dt * trap)[:, t, :, None, None], (dt * (1 - trap))[:, t, :, None, None]
        past = decay[:, t, :, None, None] * (state + last * held)
        held = k[..., None] * u[:, t, :, None]
        state = past + now * held
        ys.append(torch.einsum("bhn,bhnd->bhd", q, state))
    y = torch.stack(ys, 1) + layer.D[:, None] * u
    return layer.out_proj(y.flatten(-2) * F.silu(z)), [state, theta % (2 * torch.pi), k, u[:, -1]]


def turned_pairs(x, theta):
    """Neighbouring channels turned by theta, the rest as they are."""
    num = 2 * theta.shape[-1]
    a, b = x[..., 0:num:2], x[..., 1:num:2]
    cos, sin = theta.cos(), theta.sin()
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return torch.cat([turned, x[..., num:]], -1)


def delta_rule(q, k, v, beta, log_decay):
    state, ys = torch.zeros_like(k[:, 0, :, :, None] * v[:, 0, :, None]), []
    for t in range(q.shape[1]):
        state = log_decay[:, t, :, None, None].exp() * state
        error = v[:, t] - torch.einsum("bhk,bhkd->bhd", k[:, t], state)
        write = torch.einsum("bhk,bhd->bhkd", k[:, t], beta[:, t, :, None] * error)
        state = state + write
        ys.append(torch.einsum("bhk,bhkd->bhd", q[:, t], state))
    return torch.stack(ys, 1), state


def gated_deltanet(layer, x):
    def branch(name):
        u = getattr(layer, f"{name}_proj")(x)
        u = convolved(u, getattr(layer, f"{name}_conv1d").weight, None)
        return u.unflatten(-1, (layer.num_heads, -1))

    q, k, v = branch("q"), branch("k"), branch("v")
    q, k = (u / (u.square().sum(-1, keepdim=True) + 1e-6).sqrt() for u in (q, k))
    log_decay = -layer.A_log.exp() * F.softplus(layer.a_proj(x) + layer.dt_bias)
    beta = layer.b_proj(x).sigmoid()
    y, state = delta_rule(q / layer.head_dim**0.5, k, v, beta, log_decay)
    y = normed(y, layer.o_norm.eps) * layer.o_norm.weight
    return layer.o_proj(y.flatten(-2) * F.silu(layer.g_proj(x))), [state]


def attention(layer, x):
    def branch(name):
        u = getattr(layer, f"{name}_proj")(x).unflatten(-1, (layer.num_heads, -1))
        norm = getattr(layer, f"{name}_norm", None)
        if hasattr(norm, "weight"):
            u = normed(u, 1e-6) * norm.weight
        if not layer.rope or name == "v":
            return u
        real, imaginary = u.chunk(2, -1)
        half = torch.arange(layer.head_dim // 2, dtype=torch.float64)
        angle = torch.arange(x.shape[1])[:, None, None] * 1e4 ** (-half / len(half))
        turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([turned.real, turned.imag], -1).to(x.dtype)

    q, k, v = branch("q"), branch("k"), branch("v")
    ys = []
    for t in range(x.shape[1]):
        scores = torch.einsum("bhd,bshd->bhs", q[:, t], k[:, : t + 1]) / layer.head_dim**0.5
        ys.append(torch.einsum("bhs,bshd->bhd", scores.softmax(-1), v[:, : t + 1]))
    states = [k.transpose(1, 2), v.transpose(1, 2)]
    return layer.o_proj(torch.stack(ys, 1).flatten(-2)), states
