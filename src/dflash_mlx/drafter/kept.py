"""Contexts that outlive a generation: how large they are, and the way into a file and back.

In: a context and snapshots of it, those of one text. Out: bytes, or named arrays, or the snapshots again. Knows no
network and no file.
"""

from collections.abc import Iterable, Mapping, Sequence

import mlx.core as mx

from dflash_mlx.drafter.context import Context, ContextSnapshot, LayerSnapshot, Rows


def nbytes(places: Iterable[ContextSnapshot]) -> int:
    """Bytes of the buffers, room for more rows included; those that several places share count once."""
    held = {id(layer.rows): layer.rows for place in places for layer in place.layers}
    buffers = [buffer for rows in held.values() for buffer in (rows.keys, rows.values)]
    return sum(buffer.nbytes for buffer in buffers if buffer is not None)


def arrays(context: Context, places: Sequence[ContextSnapshot]) -> dict[str, mx.array]:
    """The rows that a next token sees at each place, as `{place}.{layer}.keys` and `.values`.

    The first place is the furthest. The others hold rows of their own only where a layer's sight is limited; of
    all other layers they have a beginning of the first place's rows.
    """
    before, named = context.snapshot(), {}
    for n, place in enumerate(places):
        context.restore(place)
        for i, layer in enumerate(context.layers):
            if n == 0 or layer.sight.most is not None:
                named[f"{n}.{i}.keys"], named[f"{n}.{i}.values"] = layer.seen()
    context.restore(before)
    return named


def fill(
    context: Context, named: Mapping[str, mx.array], lengths: Sequence[int]
) -> tuple[ContextSnapshot, ...]:
    """Put what `arrays` gave into an empty context, which is left at the first place; gives the places.

    Args:
        context: empty.
        named: arrays.
        lengths: tokens that each place stands for, those out of sight included.

    Raises:
        KeyError: they are of another network.
    """
    places: list[ContextSnapshot] = []
    for n, length in enumerate(lengths):
        for i, layer in enumerate(context.layers):
            if n > 0 and layer.sight.most is None:
                layer.restore(places[0].layers[i])
                layer.drop(lengths[0] - length)
            else:
                keys, values = named[f"{n}.{i}.keys"], named[f"{n}.{i}.values"]
                layer.restore(LayerSnapshot(Rows(), 0))
                layer.extend(keys, values, keep=keys.shape[2])
        context.length = length
        # Another thread may take it from here.
        mx.eval(context.arrays())
        places.append(context.snapshot())
    context.restore(places[0])
    return tuple(places)
