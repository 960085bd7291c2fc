"""Groups of Ray actors, with a real local Ray: as one process, and what happens when an actor dies."""

from typing import Any

import pytest
import torch

import funzero as fz
from tests.autograd.twins import F64, example, two_groups

ray = pytest.importorskip("ray")
STEPS = 3


@pytest.fixture(scope="module")
def local_ray():
    ray.init(num_cpus=5, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


def builder(which: str, stage: int) -> Any:
    """Makes one of the example's models on a rank."""

    def build() -> Any:
        from funzero.integrations.ray import Model

        ex, mesh, tx = example("07_two_groups"), fz.make_mesh(dp=-1), fz.adam(3e-3)
        params = {n: p.double() for n, p in fz.split_module(getattr(ex, which))[0].items()}
        state = fz.init_state(params, tx, specs=fz.zero_specs(params, tx, mesh, stage=stage))
        return Model(ex.encode if which == "eye" else ex.loss, state, fz.make_step(None, tx))

    return build


def groups() -> tuple[Any, Any]:
    from funzero.integrations.ray import Group

    return Group("encoder", builder("eye", 0), ranks=2, timeout_s=60), Group(
        "decoder", builder("speaker", 3), ranks=2, timeout_s=60
    )


def forwards(ex: Any, encoder: Any, decoder: Any, t: int) -> None:
    """The micro-batches of a step, all under way."""
    (pictures, classes, *_), (text, target) = ex.digits.load(F64), ex.digits.spelled()
    rows = torch.randint(len(classes), (ex.MICROS, ex.ROWS), generator=torch.Generator().manual_seed(t))
    for i, r in enumerate(rows):
        seen = encoder.forward(i, pictures[r])
        decoder.forward(i, seen, text[classes[r]], target[classes[r]])


def step(ex: Any, encoder: Any, decoder: Any, t: int) -> None:
    forwards(ex, encoder, decoder, t)
    for i in reversed(range(ex.MICROS)):  # not in the order of the forwards
        seen_bar, *_ = decoder.pull(i, 1.0, weight=ex.ROWS)
        encoder.pull(i, seen_bar, weight=ex.ROWS)
    found = decoder.update() | {"encoder": encoder.update()["weight"]}
    assert found["weight"] == found["encoder"] == ex.MICROS * ex.ROWS and not found["skipped"]


def assert_same(encoder: Any, decoder: Any, steps: int) -> None:
    for group, right in zip((encoder, decoder), two_groups(steps), strict=True):
        found = group.params()
        assert found.keys() == right.keys()
        for name, x in found.items():
            assert (x - right[name]).abs().max() <= 1e-10, f"{group.name}: {name}"


@pytest.mark.timeout(120)
def test_actors_train_as_one_process_and_come_back_from_a_checkpoint(local_ray, tmp_path):
    from funzero.integrations.ray import ActorError

    ex, (encoder, decoder) = example("07_two_groups"), groups()
    try:
        for t in range(2):
            step(ex, encoder, decoder, t)
        for group in (encoder, decoder):
            group.save(str(tmp_path / group.name))
        forwards(ex, encoder, decoder, 2)
        ray.kill(encoder._actors[1])  # its process, between forward and pull
        encoder.pull(0, None)
        with pytest.raises(ActorError, match=r"encoder: rank 1 of 2 is gone") as caught:
            encoder.update()
        assert (caught.value.group, caught.value.rank) == ("encoder", 1)
        encoder.restart(str(tmp_path / "encoder"))
        decoder.restore(str(tmp_path / "decoder"))
        step(ex, encoder, decoder, 2)
        assert_same(encoder, decoder, STEPS)
        for calls, match in (
            (lambda: [encoder.forward(0, torch.ones(2, 64, dtype=F64)) for _ in range(2)], "handle 0 is in use"),
            (lambda: encoder.pull(9, None), r"no forward is kept under handle 9; kept are \[\]"),
            (lambda: encoder.forward(1, torch.ones(3, 64, dtype=F64)), "3 rows cannot be dealt out to 2 ranks"),
        ):
            calls()
            with pytest.raises(ActorError, match=match):
                encoder.update()
            encoder.restore(str(tmp_path / "encoder"))
    finally:
        encoder.stop()
        decoder.stop()
