"""`validate`: the one gate before a drafter serves. What passes is whole, made for this target, and has been run once.

Every check has its own reason code. Where a manifest lies beside the checkpoint, the checkpoint must be what it says.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from runtime.backends.base import TargetInfo
from runtime.eagle3.checkpoint import load, read_config, version_id
from runtime.eagle3.config import Eagle3Config
from runtime.eagle3.model import Eagle3Model
from runtime.eagle3.reasons import RejectReason, rejected
from runtime.hidden_states import default_aux_layer_ids
from runtime.registry.manifest import MANIFEST_FILE, Manifest
from runtime.registry.store import VersionRecord

_PROBE_POSITIONS = 8
_PROBE_DEPTH = 3


def validate(
    version: VersionRecord | Path,
    target: TargetInfo,
    embedding: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Eagle3Model:
    """The drafter, loaded and checked against the target; DrafterRejected with the first reason against it.

    version: a registry's record, or a plain checkpoint directory (a manifest in it counts). embedding: [V, Ht].
    """
    path = version.path if isinstance(version, VersionRecord) else version
    has_manifest = isinstance(version, VersionRecord) or (path / MANIFEST_FILE).exists()
    manifest = Manifest.read(path) if has_manifest else None
    config = read_config(path)
    if manifest is not None:
        _check_manifest(manifest, version.version if isinstance(version, VersionRecord) else manifest.version, path, config)
        if manifest.target_fingerprint != target.fingerprint:
            raise rejected(
                RejectReason.TARGET_FINGERPRINT,
                f"The drafter was trained for target {manifest.target_fingerprint}; this one is {target.fingerprint}.",
            )
    _check_target(config, target)
    model = load(path, embedding, dtype=dtype, device=device)
    if manifest is not None and manifest.vocabulary_hash != model.vocabulary.hash:
        raise rejected(
            RejectReason.VOCABULARY,
            f"The drafter's vocabulary hashes to {model.vocabulary.hash}; its manifest says {manifest.vocabulary_hash}.",
        )
    _probe(model)
    return model.eval()


def _check_manifest(manifest: Manifest, version: str, path: Path, config: Eagle3Config) -> None:
    found = version_id(path)
    if not manifest.version == version == found:
        raise rejected(
            RejectReason.HASH,
            f"Version {version} has content {found} and a manifest of {manifest.version}: its files were changed after it was "
            "published; publish it again.",
        )
    if manifest.dtype != config.dtype:
        raise rejected(RejectReason.MANIFEST, f"The manifest says dtype {manifest.dtype}, the config {config.dtype}.")
    if manifest.aux_layer_ids != config.aux_layer_ids:
        raise rejected(
            RejectReason.LAYER_IDS, f"The manifest names layers {manifest.aux_layer_ids}, the config {config.aux_layer_ids}."
        )


def _check_target(config: Eagle3Config, target: TargetInfo) -> None:
    layer_ids = config.aux_layer_ids or default_aux_layer_ids(target.num_layers)  # a config that names none means the default
    if layer_ids != target.aux_layer_ids:
        raise rejected(
            RejectReason.LAYER_IDS,
            f"The drafter reads the states after layers {list(layer_ids)}; the target captures {list(target.aux_layer_ids)}.",
        )
    if config.max_position_embeddings < target.max_positions:
        raise rejected(
            RejectReason.MAX_POSITIONS,
            f"The drafter knows {config.max_position_embeddings} positions; the target serves {target.max_positions}.",
        )


@torch.no_grad()
def _probe(model: Eagle3Model) -> None:
    """Draft a few tokens from random states, at the first and the last positions; every number must be finite."""
    config, device = model.config, model.fc.weight.device
    generator = torch.Generator().manual_seed(0)
    aux = torch.randn(_PROBE_POSITIONS, 3 * config.hidden_size, generator=generator).to(device)
    token_ids = torch.randint(config.vocab_size, (_PROBE_POSITIONS,), generator=generator).to(device)
    half = _PROBE_POSITIONS // 2
    positions = torch.cat([torch.arange(half), config.max_position_embeddings - 1 - torch.arange(half)]).to(device)
    h = model.project(aux)
    for depth in range(1, _PROBE_DEPTH + 1):
        h = model.layer(token_ids, h, positions, _attend_causally)
        logits = model.draft_logits(h)
        if not bool(torch.isfinite(logits).all() and torch.isfinite(h).all()):
            raise rejected(RejectReason.NON_FINITE, f"The drafter's outputs are not finite at depth {depth} of a probe run.")
        token_ids = model.vocabulary.target_ids.to(device)[logits.argmax(-1)]


def _attend_causally(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[S, heads, D], [S, kv_heads, D] twice -> [S, heads, D]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)
