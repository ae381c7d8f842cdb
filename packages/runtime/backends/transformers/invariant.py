"""numerics=invariant: a token's logits and states are the same to the last bit whatever else is computed beside it.

Whatever else is in the batch, however the history was cut into forwards, whatever was drafted. Three things make it so, on a
CPU in float32 and as long as the number of threads stays:

- linear layers never run below the number of rows from which on oneDNN's result for a row depends on that row alone (`linear`);
- attention is one call a token, over exactly the keys that it sees, in the order of their positions: its shape depends on the
  token's position alone. Padding keys under a mask does not do: it changes how sums are cut between vectors and threads;
- activations run on pieces that are neither cut between threads nor leave a rest for scalar code, which rounds otherwise.

Norms, rotary embeddings and sums are row by row already. All this is found by trying and not promised by anybody, so
`check_invariance` tries it on the loaded model, and a model or a machine that fails is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from runtime.backends.base import Segment, Target
from runtime.backends.segments import depths
from runtime.backends.transformers.contiguous import SegmentPlan, attend
from runtime.errors import ConfigError
from runtime.linear import can_pack, pack_linears

GRAIN = 32768  # elements up to which torch runs an elementwise function on one thread
LANES = 32  # elements that vectorised code takes at once; what remains is left to scalar code
ACTIVATIONS = (nn.SiLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Mish, nn.Softplus)


class InvariantAttention:
    """Implements `attention.Attention`: one call a token.

    The nodes of a tree are taken depth first, each written behind its ancestors, so that every path is a contiguous run of
    rows when its nodes attend. Afterwards the nodes are written to the rows where `commit` expects them.
    """

    def __init__(self, plans: Sequence[SegmentPlan]) -> None:
        self._plans = plans
        self._walks = [_depth_first(plan) for plan in plans]

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        num_kv_heads, num_heads = k.shape[0], q.shape[0]
        out = torch.empty(1, q.shape[1], num_heads, v.shape[2], dtype=v.dtype, device=v.device)
        for plan, walk in zip(self._plans, self._walks, strict=True):
            own_k, own_v = k[:, plan.start : plan.end], v[:, plan.start : plan.end]
            keys, values = plan.keys[layer], plan.values[layer]
            if plan.parents is None:
                keys[:, plan.num_rows :] = own_k
                values[:, plan.num_rows :] = own_v
            for node, depth in walk:
                row = plan.num_rows + depth
                if plan.parents is not None:
                    keys[:, row] = own_k[:, node]
                    values[:, row] = own_v[:, node]
                rows = plan.rows_in_sight(plan.length + depth, window)
                query = q[:, plan.start + node].reshape(1, num_kv_heads, -1, q.shape[2])  # heads that share keys are rows
                seen = attend(query, _seen(keys, rows, row), _seen(values, rows, row), None, scale, softcap)
                out[0, plan.start + node] = seen.reshape(num_heads, v.shape[2])
            if plan.parents is not None:
                keys[:, plan.num_rows :] = own_k
                values[:, plan.num_rows :] = own_v
        return out


def _seen(rows: torch.Tensor, in_sight: tuple[int, int, int], last: int) -> torch.Tensor:
    """[1, num_kv_heads, rows in sight up to the last, D]: a view where they lie together."""
    first, end, second = in_sight
    if end == second:
        return rows[None, :, first : last + 1]
    return torch.cat([rows[:, first:end], rows[:, second : last + 1]], dim=1)[None]


def _depth_first(plan: SegmentPlan) -> list[tuple[int, int]]:
    """(node, depth) of all nodes, each after its parent and before whatever is no descendant of that parent."""
    depth = depths(plan.parents, plan.size)
    if plan.parents is None:
        return list(zip(range(plan.size), depth, strict=True))
    paths: list[tuple[int, ...]] = []
    for node, parent in enumerate(plan.parents):
        paths.append((*(paths[parent] if parent >= 0 else ()), node))
    return [(path[-1], depth[path[-1]]) for path in sorted(paths)]


class RowwiseActivation(nn.Module):
    """An elementwise function on [..., features] whose result for a row does not depend on where the row lies."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = x.shape[-1]
        if features % LANES == 0 and x.numel() <= GRAIN:
            y: torch.Tensor = self._function(x)
            return y
        rows = F.pad(x.reshape(-1, features), (0, -features % LANES))
        pieces = torch.split(rows, max(GRAIN // rows.shape[1], 1))
        return torch.cat([self._function(piece) for piece in pieces])[:, :features].reshape(x.shape)


def check_device(device: torch.device, dtype: torch.dtype) -> None:
    """ConfigError unless linear layers can be packed there."""
    if not can_pack(torch.empty(1, dtype=dtype, device=device)):
        raise ConfigError(
            f"backend.numerics is 'invariant', which {dtype} on {device.type} cannot be: it needs float32 on a CPU and a torch "
            f"with oneDNN. Use model.device=cpu model.dtype=float32, or backend.numerics=default."
        )


def make_invariant(model: nn.Module) -> None:
    """Pack the linear layers and wrap the activations, in place. ConfigError where that cannot be done."""
    try:
        pack_linears(model, invariant=True)
    except RuntimeError as error:
        raise ConfigError(f"backend.numerics is 'invariant', but: {error} Use backend.numerics=default.") from error
    for parent in [module for module in model.modules() if not isinstance(module, RowwiseActivation)]:
        for name, child in list(parent.named_children()):
            if isinstance(child, ACTIVATIONS) or type(child).__module__ == "transformers.activations":
                setattr(parent, name, RowwiseActivation(child))


def check_invariance(target: Target) -> None:
    """Compute a short text token by token, in chunks, beside another and as a tree. ConfigError if a bit differs."""
    text = torch.randint(0, target.info.vocab_size, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    alone, whole, beside, tree = (target.new_cache() for _ in range(4))
    expected = []
    for token in text:
        [output] = target.forward([Segment(alone, [token])])
        target.commit(alone, [0])
        expected.append(output)
    chunk, _ = target.forward([Segment(whole, text, num_logits=24), Segment(beside, text[::-1])])
    target.forward([Segment(tree, text[:16])])
    target.commit(tree, range(16))
    # Each token of the rest has a sibling before it that is a leaf.
    tokens = [token for node in text[16:] for token in (node ^ 1, node)]
    parents = [parent for depth in range(8) for parent in (2 * depth - 1,) * 2]
    [branches] = target.forward([Segment(tree, tokens, parents, num_logits=16)])
    for index, output in enumerate(expected):
        others = [(chunk, index)] + ([(branches, 2 * (index - 16) + 1)] if index >= 16 else [])
        if any(
            not torch.equal(other.logits[row], output.logits[0]) or not torch.equal(other.hidden.aux[row], output.hidden.aux[0])
            for other, row in others
        ):
            raise ConfigError(
                f"backend.numerics is 'invariant', but token {index} of a trial text depends on what is computed beside it: "
                f"this model has parts that round differently in a batch. Use backend.numerics=default."
            )
    for cache in (alone, whole, beside, tree):
        target.drop(cache)
