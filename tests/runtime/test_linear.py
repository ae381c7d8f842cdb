from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from runtime import linear
from runtime.linear import (
    MklLinear,
    OneDnnLinear,
    PackedLinear,
    can_halve,
    can_use_mkl,
    kernel_rows,
    pack_linears,
    rows_for_invariance,
)

KINDS = [
    OneDnnLinear,
    pytest.param(MklLinear, marks=pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")),
]
SHAPES = [(192, 576), (576, 1536), (1000, 64), (7, 5), (1, 1)]


def weights(out_features: int, in_features: int, bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(out_features)
    weight = torch.randn(out_features, in_features, generator=generator)
    return weight, torch.randn(out_features, generator=generator) if bias else None


def assert_equal_up_to_rounding(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_plain_layer_at_every_size(kind: type[PackedLinear], shape: tuple[int, int], bias: bool) -> None:
    weight, offset = weights(*shape, bias)
    packed = kind(weight, offset)
    rows = torch.randn(300, shape[1], generator=torch.Generator().manual_seed(1))
    for size in [*range(1, 65), 300]:
        assert_equal_up_to_rounding(packed(rows[:size]), F.linear(rows[:size], weight, offset))


@pytest.mark.parametrize("shape", [(8,), (1, 8), (0, 8), (2, 3, 8), (2, 1, 4, 8)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_takes_any_leading_shape(kind: type[PackedLinear], shape: tuple[int, ...]) -> None:
    weight, offset = weights(6, 8, True)
    x = torch.randn(shape)
    y = kind(weight, offset)(x)
    assert y.shape == (*shape[:-1], 6)
    if y.numel():
        assert_equal_up_to_rounding(y, F.linear(x, weight, offset))


@pytest.mark.parametrize("kind", KINDS)
def test_takes_inputs_that_are_not_contiguous(kind: type[PackedLinear]) -> None:
    weight, _ = weights(6, 8, False)
    x = torch.randn(8, 5).T
    assert_equal_up_to_rounding(kind(weight, None)(x), F.linear(x, weight))
    sliced = torch.randn(5, 16)[:, ::2]
    assert_equal_up_to_rounding(kind(weight, None)(sliced), F.linear(sliced, weight))


@pytest.mark.parametrize("kind", KINDS)
def test_packs_a_view_and_keeps_no_part_of_it(kind: type[PackedLinear]) -> None:
    weight, offset = weights(6, 8, True)
    assert offset is not None
    expected = F.linear(torch.ones(1, 8), weight, offset)
    packed = kind(weight.T.contiguous().T, offset)
    weight.zero_()
    offset.zero_()
    assert_equal_up_to_rounding(packed(torch.ones(1, 8)), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_has_nothing_to_train(kind: type[PackedLinear]) -> None:
    packed = kind(*weights(6, 8, True))
    assert not list(packed.parameters())
    with pytest.raises(RuntimeError, match="no gradient"):
        packed(torch.randn(2, 8, requires_grad=True))
    with torch.no_grad():
        assert packed(torch.randn(2, 8, requires_grad=True)).shape == (2, 6)


@pytest.mark.parametrize("kind", KINDS)
def test_refuses_what_it_cannot_hold(kind: type[PackedLinear]) -> None:
    with pytest.raises(ValueError, match=r"torch\.bfloat16 on cpu cannot be packed"):
        kind(torch.zeros(2, 2, dtype=torch.bfloat16), None)


@pytest.mark.parametrize("has_mkl", [False, True])
def test_mkl_packs_where_it_is_quicker_and_can_do_what_is_asked(has_mkl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if has_mkl and not torch.backends.mkl.is_available():
        pytest.skip("this torch has no MKL")
    monkeypatch.setattr(linear, "can_use_mkl", lambda: has_mkl)
    default, invariant = nn.Sequential(nn.Linear(8, 6)), nn.Sequential(nn.Linear(8, 6))
    pack_linears(default)
    pack_linears(invariant, invariant=True)
    assert type(default[0]) is (MklLinear if has_mkl else OneDnnLinear)
    assert type(invariant[0]) is OneDnnLinear


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
def test_where_mkl_is_wrong_for_other_rows_than_it_packed_for_it_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at once for each shape."""
    monkeypatch.setattr(linear, "can_use_mkl", lambda: True)
    init, compute, made = MklLinear.__init__, MklLinear._compute, []
    monkeypatch.setattr(MklLinear, "_compute", lambda self, x, num_rows: compute(self, x, num_rows) + 0.1 * (num_rows == 8))
    monkeypatch.setattr(MklLinear, "__init__", lambda self, *args: made.append(args) or init(self, *args))
    module = nn.Sequential(*(nn.Linear(8, 6) for _ in range(3)))
    assert pack_linears(module) == 3
    assert all(type(layer) is OneDnnLinear for layer in module)
    assert len(made) == 1


def test_mkl_is_for_processors_of_intel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear.Path, "exists", lambda _: True)
    for vendor in ("GenuineIntel", "AuthenticAMD"):
        monkeypatch.setattr(linear.Path, "read_text", lambda _, vendor=vendor: f"processor: 0\nvendor_id: {vendor}\n")
        is_intel = vendor == "GenuineIntel"
        assert can_use_mkl.__wrapped__() == (is_intel and torch.backends.mkl.is_available())


class Small(nn.Module):
    """A tied head, a layer used twice, and one that only looks like a linear layer."""

    class Doubling(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8, bias=False))
        self.again = self.inner[2]
        self.doubling = self.Doubling(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.inner(self.embed(ids))
        return self.head(self.doubling(x) + self.again(self.inner[0](x)))


@torch.no_grad()
def test_a_module_computes_the_same_after_packing() -> None:
    module = Small()
    ids = torch.tensor([[1, 2, 3]])
    expected, embedding = module(ids), module.embed.weight
    assert pack_linears(module) == 4
    assert_equal_up_to_rounding(module(ids), expected)
    assert module.embed.weight is embedding
    assert type(module.doubling) is Small.Doubling
    assert isinstance(module.head, PackedLinear)
    assert pack_linears(module) == 0


def test_other_dtypes_stay_plain() -> None:
    module = Small().to(torch.bfloat16)
    assert pack_linears(module) == 0
    assert type(module.head) is nn.Linear


@torch.no_grad()
@pytest.mark.parametrize("in_features", [5, 64, 1024, 1025, 1536, 4000])
def test_an_invariant_layer_computes_each_row_alike(in_features: int) -> None:
    """Of a layer as wide as the last ones, oneDNN computes a single row otherwise than several on some processors."""
    module = nn.Sequential(nn.Linear(in_features, 96))
    pack_linears(module, invariant=True)
    rows = torch.randn(150, in_features, generator=torch.Generator().manual_seed(2))
    alone = torch.cat([module(rows[index : index + 1]) for index in range(len(rows))])
    for size in (*range(2, 20), 37, 64, 150):
        assert torch.equal(module(rows[-size:]), alone[-size:])


@pytest.mark.parametrize("shape", [(8,), (1, 8), (2, 1, 8), (1, 3, 8)], ids=str)
def test_few_rows_are_filled_up(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    layer = OneDnnLinear(*weights(6, 8, True), min_rows=4)
    sizes: list[int] = []
    compute = layer.exactly
    monkeypatch.setattr(layer, "exactly", lambda x: sizes.append(x.numel() // 8) or compute(x))
    x = torch.randn(shape)
    assert_equal_up_to_rounding(layer(x), OneDnnLinear(*weights(6, 8, True))(x))
    assert sizes == [4]


class Unsteady(OneDnnLinear):
    """As if oneDNN changed its ways at some number of rows."""

    changes_at = 0

    def exactly(self, x: torch.Tensor) -> torch.Tensor:
        return super().exactly(x) + (len(x) < self.changes_at)


@pytest.mark.parametrize(("changes_at", "expected"), [(0, 1), (2, 2), (9, 9)])
def test_finds_the_rows_from_which_on_all_is_alike(changes_at: int, expected: int) -> None:
    layer = Unsteady(*weights(6, 8, True))
    layer.changes_at = changes_at
    assert rows_for_invariance(layer) == expected


def test_a_machine_that_never_computes_alike_is_refused() -> None:
    layer = Unsteady(*weights(6, 8, True))
    layer.changes_at = 40
    with pytest.raises(RuntimeError, match="8 to 6 features gives a row other bits among 33 rows than among 128"):
        rows_for_invariance(layer)


def test_batches_of_every_size_need_few_kernels() -> None:
    computed = [kernel_rows(size) for size in range(1, 1025)]
    assert len(set(computed)) < 64
    assert all(size <= rows < size * 1.5 for size, rows in enumerate(computed, 1))
    assert computed[:16] == list(range(1, 17)), "verification of a few tokens computes nothing besides"


def test_a_layer_computes_whole_steps_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = OneDnnLinear(*weights(6, 8, True))
    seen: set[int] = set()
    compute = packed.exactly
    monkeypatch.setattr(packed, "exactly", lambda x: seen.add(x.numel() // 8) or compute(x))
    for size in range(1, 200):
        packed(torch.ones(1, size, 8))
    assert seen == {kernel_rows(size) for size in range(1, 200)}


@pytest.mark.skipif(not can_halve(torch.zeros(1, 1)), reason="this CPU does not multiply in bfloat16")
def test_halved_weights_lose_nothing_and_states_their_last_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(48, 32, generator=generator).bfloat16().float()
    assert can_halve(exact)
    assert not can_halve(torch.randn(48, 32, generator=generator))
    x = torch.randn(5, 32, generator=generator)
    y = OneDnnLinear(exact, halve=True)(x)
    assert y.dtype is torch.float32
    expected = (x.bfloat16().double() @ exact.double().T).float()
    torch.testing.assert_close(y, expected, rtol=2**-8, atol=1e-5)


def test_only_weights_that_lose_nothing_are_halved() -> None:
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    with torch.no_grad():
        module[0].weight.copy_(module[0].weight.bfloat16())
    is_halved = can_halve(module[0].weight)
    pack_linears(module, halve=True)
    assert [part.dtype for part in module] == [torch.bfloat16 if is_halved else torch.float32, torch.float32]
