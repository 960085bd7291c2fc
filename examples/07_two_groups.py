"""An encoder and a language model in groups of ranks of their own, with their own layouts, train as one model.

    torchrun --nproc-per-node 4 examples/07_two_groups.py [steps [frozen]]

The first half of the ranks has the encoder, whole on each; the second half the language model, at ZeRO-3. What is seen goes
one way, cotangents come back, and several micro-batches are under way at a time.
"""

import sys

import digits
import torch

import funzero as fz

ROWS, MICROS = 64, 2  # rows of a micro-batch over all ranks of a group, and micro-batches of a step
torch.manual_seed(0)
eye, speaker = digits.Eye(), digits.Speaker()


def encode(params, pictures):
    return fz.functional_call(eye, params, pictures)


def speak(params, seen, text):
    return fz.functional_call(speaker, params, seen, text)


def loss(params, seen, text, target):
    return fz.losses.cross_entropy(speak(params, seen, text), target, ignore_index=-100)[0]


def encoder_step(state, step, pictures, here, there):
    pulls = []
    for i, rows in enumerate(pictures):
        seen, pull = fz.vjp(encode, state.params, rows, specs=state.specs)
        fz.transfer(seen, here, there, handle=i)
        pulls.append(pull)
    for i, pull in enumerate(pulls):
        seen_bar = fz.transfer(None, there, here, handle=i)
        grads, _ = pull(seen_bar, last=True)
        state = fz.accumulate_into(state, grads, weight=ROWS)
    return step.update(state)


def decoder_step(state, step, texts, there, here):
    for i, (text, target) in enumerate(texts):
        seen = fz.transfer(None, there, here, handle=i)
        _, pull = fz.vjp(loss, state.params, seen, text, target, specs=state.specs)
        grads, seen_bar, *_ = pull(1.0, last=True)
        fz.transfer(seen_bar, here, there, handle=i)
        state = fz.accumulate_into(state, grads, weight=ROWS)
    return step.update(state)


def setup(world, dtype=torch.float32):
    """For each group its mesh, its state (elsewhere None), and its step; then the layout of what is seen in both."""
    half, made = world // 2, []
    for module, ranks, stage in ((eye, range(half), 0), (speaker, range(half, world), 3)):
        mesh, tx = fz.make_mesh(ranks=ranks, dp=-1), fz.adam(3e-3)
        params = {n: p.to(dtype) for n, p in fz.split_module(module)[0].items()}
        specs = fz.zero_specs(params, tx, mesh, stage=stage)
        made.append((mesh, fz.init_state(params, tx, specs=specs) if mesh.here else None, fz.make_step(None, tx)))

    def seen(rows):
        shape = torch.empty(rows, digits.SEEN, dtype=dtype, device="meta")
        return [fz.Specs.bind(mesh, fz.Spec(fz.P("dp")), shape) for mesh, *_ in made]

    return made, seen


def train(world, *, steps, dtype=torch.float32, frozen=False):
    (encoder, decoder), seen = setup(world, dtype)
    (mesh, state, step), is_encoder = (encoder, True) if encoder[1] is not None else (decoder, False)
    (pictures, classes, *_), (text, target), specs = digits.load(dtype), digits.spelled(), seen(ROWS)
    for t in range(steps):
        rows = torch.randint(len(classes), (MICROS, ROWS), generator=torch.Generator().manual_seed(t))
        micros = [fz.data.local({"x": pictures[r], "y": classes[r]}, mesh) for r in rows]
        if is_encoder:
            after, _ = encoder_step(state, step, [m["x"] for m in micros], *specs)
            state = state if frozen else after
        else:
            state, _ = decoder_step(state, step, [(text[m["y"]], target[m["y"]]) for m in micros], *specs)
    return state, is_encoder, seen


def accuracy(state, is_encoder, seen):
    """The share of held-out pictures whose name is the likeliest of the ten; None in the encoder's group."""
    *_, pictures, classes = digits.load()
    (text, target), specs, mesh = digits.spelled(), seen(len(classes)), state.specs.mesh
    if is_encoder:
        fz.transfer(fz.call(encode, state, fz.data.local(pictures, mesh)), *specs)
        return None
    found = fz.transfer(None, *specs)
    logits = [fz.call(speak, state, found, t.expand(len(found), -1)) for t in text]
    wrong = [torch.nn.functional.cross_entropy(x.transpose(1, 2), t.expand(len(x), -1), reduction="none").sum(1)
             for x, t in zip(logits, target, strict=True)]  # fmt: skip
    return (torch.stack(wrong).argmin(0) == fz.data.local(classes, mesh)).double().mean()


if __name__ == "__main__":
    world = fz.make_mesh(dp=-1).world
    if world % 2:
        sys.exit(print("start this under torchrun with an even number of ranks"))
    found = train(world, steps=int(sys.argv[1]) if len(sys.argv) > 1 else 600, frozen=sys.argv[2:] == ["frozen"])
    right = accuracy(*found)
    if right is not None:
        print(f"{100 * right:.1f} % of its share of held-out pictures named right")
