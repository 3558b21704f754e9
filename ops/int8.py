"""Keys and values as 8-bit integers, in half of the memory that bf16 takes.

    value ≈ integer / 128 · scale              from −127 to 127; a scale for each token and head
    key   ≈ (integer / 128 · scale + center) · stretch

A token's largest number becomes ± 127, so a large one makes all others of its head coarse. And
Qwen2.5's key bias is up to 354, a hundred times what tells keys apart. But a softmax ignores what
all keys have in common: q · (k − center) = q · k − q · center, and the last term is the same for
all keys. So the center is subtracted: the bias after RoPE, averaged over many positions.
(SageAttention subtracts the mean of the keys for the same reason.)

RoPE turns some pairs of numbers so fast that the average of their bias is about 0. So subtracting
it leaves the bias in the keys. Where that is large, a pair is divided by its stretch, a power of
two, and the query's pair is multiplied by it. Without a bias, or if a norm follows it, center is 0
and stretch is 1.

Only decode steps read integers. A prefill stores them, but its own attention, like training, reads
keys and values that are not rounded. attention.py takes Pages in the place of a layer's tensor: it
writes them as one, reads them as one (keys without their center), and its fast kernel takes what
for_kernel returns.

results/LOG.md has what rounding costs, and why 8-bit floats fail. Needs: torch; on a GPU also
triton.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

try:
    import triton.language as tl
    from triton import jit
    from triton.language import constexpr
except ImportError:  # macOS has no Triton: these only let Python define the kernels below
    constexpr = int

    def jit(kernel):
        return kernel


POSITIONS = 8192  # over which a bias is averaged: the same for all rollouts, whatever their lengths


class Pages:
    """Keys, or values, of one layer."""

    def __init__(self, integers: Tensor, bias: Tensor, cos: Tensor, sin: Tensor):
        """integers (pages, Hkv, PAGE, Dh) uint8: what is stored is the integer + 128. The kernel
        wants each head's values of a page as (Dh, PAGE) in memory.

        bias (Hkv, Dh) f32: of keys, before RoPE; of values 0. cos, sin (POSITIONS, Dh/2) f32: of
        the first positions.
        """
        self.integers = integers
        self.scale = torch.zeros(*integers.shape[:3], 1, device=integers.device)
        self.shape = integers.shape
        # RoPE multiplies a pair, a complex number, by cos + i · sin. So the average of its turns is
        # one turn by their average.
        pair = torch.complex(*bias.chunk(2, -1))  # (Hkv, Dh/2)
        turn = torch.complex(cos.mean(0), sin.mean(0))  # (Dh/2,)
        center = pair * turn
        # lost: the variance of the turns, whose length is cos[0] (1, or YaRN's factor). left: the
        # mean square of what subtracting the center leaves in a pair. Without a bias, numbers of a
        # key are about 2, so a pair is stretched only where left is above about 4².
        lost = (cos[0].square() - (turn * turn.conj()).real).clamp(min=0)  # ≥ 0 but for rounding
        left = (pair * pair.conj()).real * lost
        stretch = (1 + left / 4**2).sqrt().log2().round().exp2()
        self.stretch = torch.cat((stretch, stretch), -1)  # (Hkv, Dh)
        self.center = torch.cat((center.real, center.imag), -1) / self.stretch

    def __setitem__(self, slots: tuple, x: Tensor):
        """Round x (m, Hkv, Dh) into slots: (page (m,), :, offset (m,))."""
        x = x / self.stretch - self.center
        largest = x.abs().amax(-1, keepdim=True)  # 0: the integers are arbitrary, their scale is 0
        self.integers[slots] = (x * (127 / largest) + 128.5).to(torch.uint8)
        self.scale[slots] = largest * (128 / 127)  # 127 / 128 of it is the largest

    def __getitem__(self, pages: Tensor) -> Tensor:
        """→ what pages (…) hold, without center: (…, Hkv, PAGE, Dh) f32."""
        x = (self.integers[pages] / 128 - 1) * self.scale[pages]
        return x * self.stretch[:, None]

    def for_kernel(self, values: "Pages") -> tuple[Tensor, Tensor, dict]:
        """Of keys → k_cache and v_cache of attention's fast kernel, and its last arguments."""
        last = dict(
            k_scale=self.scale,
            v_scale=values.scale,
            center=self.center,
            stretch=self.stretch,
            LOAD=load_tile,
            STORE=store_token,
        )
        return self.integers, values.integers, last


def pages_of_layers(
    layers: Sequence, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor
) -> tuple[list[Pages], list[Pages]]:
    """→ each layer's keys, and its values.

    layers: of a Decoder. k, v (layers, pages, Hkv, PAGE, Dh) uint8. cos, sin: as for Pages.
    """
    *_, Hkv, page_size, Dh = k.shape
    v = v.view(*v.shape[:3], Dh, page_size).mT  # as the kernel reads them
    none = torch.zeros(Hkv, Dh, device=k.device)
    keys = []
    for layer, integers in zip(layers, k, strict=True):
        bias = layer.self_attn.qkv_proj.base.bias
        if bias is None or layer.self_attn.heads.norms:  # a norm comes after the bias
            bias = none
        else:
            bias = bias.float().view(-1, Dh)[-2 * Hkv : -Hkv]
        keys.append(Pages(integers, bias, cos, sin))
    return keys, [Pages(integers, none, cos, sin) for integers in v]


# --- the same in attention's fast kernel, which has Dh as two halves of HALF ≥ Dh/2 columns


@jit
def load_tile(
    k_cache, v_cache, k_scale, v_scale, at, in_page, t, d, seen, DH: constexpr, PAGE: constexpr
):
    """Load positions in_page + t of a page, t (TILE,) → k1 and k2 (TILE, HALF), v (2·HALF, TILE),
    all fp16, and the scales (TILE, 1) f32: of a key, for its score, and of a value, for its p.

    at: where position in_page is in k_cache. d (HALF,): columns of a half. seen (TILE, 1): which
    positions are before the new token.
    """
    k_ptr = k_cache + at + t[:, None] * DH + d
    k1 = tl.load(k_ptr, mask=seen & (d < DH // 2), other=0)
    k2 = tl.load(k_ptr + DH // 2, mask=seen & (d < DH // 2), other=0)
    k1 = dequantized(k1)
    k2 = dequantized(k2)
    # A page has a head's values as (Dh, PAGE), so position i is at i · DH from the page's start in
    # keys, and at i in values. Integers are loaded and dequantized in fours, which a mask of
    # positions would split: values past the row's position are loaded, too. They are finite, and p
    # is 0.
    v_at = at - tl.multiple_of(in_page * (DH - 1), t.shape[0])
    dim = tl.arange(0, 2 * d.shape[0])[:, None]
    v = dequantized(tl.load(v_cache + v_at + t + dim * PAGE, mask=dim < DH, other=0))
    # A score past the row's position is dropped, whatever its scale. But v's scale multiplies p,
    # and 0 · NaN would stay.
    scale_at = at // DH + t[:, None]
    k_factor = tl.load(k_scale + scale_at)
    v_factor = tl.load(v_scale + scale_at, mask=seen, other=0.0)
    return k1, k2, v, k_factor, v_factor


@jit
def dequantized(integers):
    """→ float16: (integers − 128) / 128.

    The float16 with the bytes 0x48 and n is 8 + n / 128, so one instruction, which puts bytes side
    by side, makes floats of two integers. Then the excess, 8 + 128 / 128, is subtracted.
    """
    x = tl.inline_asm_elementwise(
        "prmt.b32 $0, $2, 0x48484848, 0x4140; prmt.b32 $1, $2, 0x48484848, 0x4342;",
        "=r,=r,r",
        [integers],
        tl.float16,
        is_pure=True,
        pack=4,
    )
    return x - 9


@jit
def store_token(
    k_cache, v_cache, k_scale, v_scale, at, position, d, k1, k2, v, center, DH: constexpr,
    PAGE: constexpr,
):  # fmt: skip
    """Store the new token's key and value → k1, k2, v as they are read.

    at: where its position is in k_cache. k1, k2 (1, HALF): the key's halves, divided by stretch.
    v (2·HALF,). center (HALF, 2). d: as above.
    """
    both = tl.join(d, d + DH // 2)  # (HALF, 2)
    k = tl.reshape(tl.join(k1, k2), both.shape) - center
    k = _stored(k, k_cache + at + both, k_scale + at // DH, (d < DH // 2)[:, None])
    k1, k2 = tl.split(k)
    dim = tl.arange(0, 2 * d.shape[0])
    v_slot = v_cache + at - position % PAGE * (DH - 1) + dim * PAGE
    v = _stored(v, v_slot, v_scale + at // DH, dim < DH)
    return k1, k2, v


@jit
def _stored(x, place, scale_place, mask):
    """Round x, all numbers of one token and head, as __setitem__ does, but for the last bit of
    127 / largest, and store it → x as it is read.
    """
    largest = tl.max(tl.abs(x))  # fp32, also if x is bf16
    integers = (x * tl.div_rn(127.0, largest) + 128.5).to(tl.uint8)
    scale = largest * (128 / 127)
    tl.store(place, integers, mask=mask)
    tl.store(scale_place, scale)
    return (integers / 128 - 1) * scale


if __name__ == "__main__":
    torch.manual_seed(0)
    bias = torch.tensor([[300.0, 50.0, 0.0, 0.0]])  # of pairs (0, 2) and (1, 3) of a head, Dh = 4
    angle = torch.arange(POSITIONS)[:, None] * torch.tensor([1e-6, 1.0])  # one slow, one fast
    cos, sin = angle.cos(), angle.sin()
    pair = torch.complex(*bias.chunk(2, -1)) * torch.complex(cos[7], sin[7])
    key = torch.randn(1, 4) + torch.cat((pair.real, pair.imag), -1)  # of position 7
    print("key:", key[0].tolist())
    first = torch.tensor([0])
    for name, known in (("", 0 * bias), (" with center and stretch", bias)):
        pages = Pages(torch.zeros(1, 1, 1, 4, dtype=torch.uint8), known, cos, sin)
        pages[first, :, first] = key[None]
        read = pages[first][0, 0, 0] + pages.center * pages.stretch
        print(f"rounding error{name}: {(read - key).abs().max():.3f}")
