"""Kind 7: checkpoints. BR31 is in tests/numerics/test_state_dtypes.py, BR35's buffers in test_kind7_buffers.py, BR36's
random numbers in tests/numerics/test_br36_random.py."""

import os
import resource
import signal
import threading

import pytest
import torch

import funzero as fz
from funzero.checkpoint import disk
from funzero.checkpoint import save as saving
from tests.cases.common import STAGES, difference, one_for_all
from tests.checkpoint.common import batch, everything, make, params
from tests.ranks import once, pool

# BR32 --------------------------------------------------------------------------------------------------------------


def br32(rank, world, root, stage):
    """The writer is held while training goes on in place; then a second save, and a load, while one is pending."""
    gate, real = threading.Event(), disk.write_file
    disk.write_file = lambda path, items: gate.wait(30) and real(path, items)
    try:
        state, _, like = make(stage)
        step = fz.make_step(_loss, fz.adamw(0.1, weight_decay=0.1), specs=state.specs, max_norm=1.0)  # donates
        state, _ = step(state, batch(state.specs.mesh))
        manager = fz.CheckpointManager(root)
        first = everything(state)
        manager.save(state)
        for t in range(3):
            state, _ = step(state, batch(state.specs.mesh, t))
        assert manager.latest() is None, "the writer was meant to be held"
        fourth = everything(state)
        threading.Timer(0.3, gate.set).start()
        manager.save(state)  # waits for the first
        loaded = manager.restore(like)  # waits for the second
        return first, everything(fz.restore(manager.path(1), like)), fourth, everything(loaded), manager.steps()
    finally:
        disk.write_file = real


def _loss(p, b):
    from tests.checkpoint.common import loss_fn

    return loss_fn(p, b)


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 0), (2, 3)])
def test_br32_a_background_save_has_the_values_of_its_moment(tmp_path, world, stage):
    for first, loaded, fourth, latest, steps in pool(world).run(br32, str(tmp_path), stage):
        assert not difference(loaded, first) and first["step"] == 1
        assert not difference(latest, fourth) and fourth["step"] == 4
        assert steps == [1, 4]


def br32_error(rank, world, root):
    state, step, like = make(3)
    manager, real = fz.CheckpointManager(root), disk.write_file
    manager.save(state)
    manager.wait()
    state, _ = step(state, batch(state.specs.mesh))

    def fail(path, items):
        raise OSError(28, "No space left on device")

    if rank == world - 1:
        disk.write_file = fail
    texts = []
    try:
        for call in ("save", "wait", "restore"):
            manager.save(state)
            try:
                {"save": lambda: manager.save(state), "wait": manager.wait, "restore": lambda: manager.restore(like)}[
                    call
                ]()
                texts.append("nothing raised")
            except OSError as error:
                texts.append(str(error))
    finally:
        disk.write_file = real
    steps, left = manager.steps(), os.listdir(root)
    manager.save(state)
    manager.wait()
    return texts, steps, left, manager.steps(), os.listdir(root)


@pytest.mark.parametrize("world", (1, 2))
def test_br32_an_error_of_the_writer_is_raised_by_the_next_call_on_all_ranks(tmp_path, world):
    for rank, (texts, steps, left, after, end) in enumerate(pool(world).run(br32_error, str(tmp_path))):
        assert len(texts) == 3 and all("No space left on device" in t for t in texts), texts
        assert steps == [0] and after == [0, 1], "the good one stays, and the step can be saved again"
        assert rank or left == ["step-00000000"], "the first rank removes what failed"
        assert rank or sorted(end) == ["step-00000000", "step-00000001"]


# BR33 --------------------------------------------------------------------------------------------------------------


def br33_child(rank, world, root, how):
    """Checkpoint at step 1; the save of step 2 is cut short."""
    state, step, _ = make(3)
    manager = fz.CheckpointManager(root, background=False)
    state, _ = step(state, batch(state.specs.mesh, 1))
    manager.save(state)
    state, _ = step(state, batch(state.specs.mesh, 2))
    if how == "kill" and rank == world - 1:
        saving.disk.write_small = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    if how == "limit" and rank == world - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    try:
        manager.save(state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def br33_after(rank, world, root):
    state, step, like = make(3)
    manager = fz.CheckpointManager(root)
    first, _ = step(state, batch(state.specs.mesh, 1))
    latest, loaded = manager.latest(), manager.restore(like)
    second, _ = step(loaded, batch(state.specs.mesh, 2))
    manager.save(second)
    manager.wait()
    return (
        latest,
        everything(first),
        everything(loaded),
        manager.latest(),
        everything(second),
        everything(manager.restore(like)),
    )


@pytest.mark.parametrize("how", ("limit", "kill"))
def test_br33_a_save_cut_short_is_no_checkpoint_and_blocks_nothing(tmp_path, how):
    world = 2
    outcomes = once(br33_child, world, str(tmp_path), how, timeout=60)
    assert not any(o.ok for o in outcomes), "every rank was meant to hear of it"
    if how == "limit":
        assert all("File too large" in o.error for o in outcomes), outcomes
    for latest, first, loaded, end, second, reloaded in pool(world).run(br33_after, str(tmp_path)):
        assert latest == 1 and not difference(loaded, first)
        assert end == 2 and not difference(reloaded, second)
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"], "left-overs stay"


def br33_restore(rank, world, path):
    _, _, like = make(3)
    try:
        fz.restore(path, like)
    except fz.CheckpointError as error:
        return str(error)
    return "loaded"


def test_br33_a_flipped_byte_names_the_file_and_the_leaf_on_all_ranks(tmp_path):
    pool(2).run(br33_write, str(tmp_path / "one"))
    piece = fz.read_manifest(tmp_path / "one").leaves["opt_state/scale_by_adam/mu/b"].pieces[0]
    file = tmp_path / "one" / piece.file
    raw = bytearray(file.read_bytes())
    raw[piece.at] ^= 1
    file.write_bytes(raw)
    for text in pool(2).run(br33_restore, str(tmp_path / "one")):
        assert piece.file in text and "opt_state/scale_by_adam/mu/b" in text, text


def br33_write(rank, world, path):
    state, step, _ = make(3)
    state, _ = step(state, batch(state.specs.mesh))
    fz.save(path, state)


def test_br33_the_old_one_stays_until_the_new_is_complete(tmp_path, monkeypatch):
    state, step, like = make(0)
    fz.save(tmp_path / "s", state)
    before = everything(state)
    state, _ = step(state, batch(state.specs.mesh))
    with pytest.raises(FileExistsError, match="overwrite=True"):
        fz.save(tmp_path / "s", state)
    with monkeypatch.context() as patch:
        patch.setattr(saving.disk, "sync", lambda path: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(OSError, match="Input/output"):
            fz.save(tmp_path / "s", state, overwrite=True)
    assert not difference(everything(fz.restore(tmp_path / "s", like)), before)
    fz.save(tmp_path / "s", state, overwrite=True)
    assert not difference(everything(fz.restore(tmp_path / "s", like)), everything(state))
    assert os.listdir(tmp_path) == ["s"]


# BR34 --------------------------------------------------------------------------------------------------------------


def br34_save(rank, world, root, stages):
    out = {}
    for stage in stages:
        state, step, _ = make(stage)
        for t in range(2):
            state, _ = step(state, batch(state.specs.mesh, t))
        fz.save(f"{root}/{world}-{stage}", state)
        opened = step.accumulate(state, batch(state.specs.mesh, 7))
        fz.save(f"{root}/{world}-{stage}-open", opened)
        before = everything(state)
        closed, metrics = step.update(opened)
        for t in (2, 3):
            state, _ = step(state, batch(state.specs.mesh, t))
        out[stage] = before, everything(state), everything(closed), metrics
    return out


def br34_load(rank, world, root, names, stages):
    out = {}
    for stage in stages:
        _, step, like = make(stage)
        for name in names:
            state = fz.restore(f"{root}/{name}", like)
            before = everything(state)
            closed, metrics = step.update(fz.restore(f"{root}/{name}-open", like))
            for t in (2, 3):
                state, _ = step(state, batch(like.specs.mesh, t))
            out[f"{name} to {world}-{stage}"] = before, everything(state), everything(closed), metrics
    return out


def close(a, b):
    """Equal up to 1e-12 of the leaf's largest value."""
    same = a.dtype == b.dtype and a.shape == b.shape
    return same and (
        a.numel() == 0 or float((a.double() - b.double()).abs().max()) <= 1e-12 * float(b.double().abs().max())
    )


def check_br34(root, saves, loads):
    """`saves`: {world: stages}; `loads`: [(world, names, stages)]."""
    made = {}
    for world, stages in saves.items():
        for stage, row in one_for_all(pool(world).run(br34_save, root, stages)).items():
            made[f"{world}-{stage}"] = row
    for world, names, stages in loads:
        for found in pool(world).run(br34_load, root, names, stages):
            for cell, (before, end, closed, metrics) in found.items():
                right, right_end, right_closed, right_metrics = made[cell.split(" ")[0]]
                assert not difference(before, right), f"{cell}: {difference(before, right)} differ"
                for got, want in ((end, right_end), (closed, right_closed)):
                    off = {n: (got[n], want[n]) for n in want if not close(got[n], want[n])}
                    assert got.keys() == want.keys() and not off, f"{cell}: {off}"
                assert close(metrics.loss, right_metrics.loss) and metrics.aux["rows"] == right_metrics.aux["rows"], (
                    cell
                )


def test_br34_pairs_of_layouts(tmp_path):
    saves = {1: (0,), 2: (1, 2), 4: (3,)}
    loads = [(1, ("4-3", "2-2"), (3,)), (2, ("4-3", "1-0"), (0, 3)), (3, ("4-3", "2-1"), (1, 2)), (4, ("2-2",), (3,))]
    check_br34(str(tmp_path), saves, loads)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_br34_every_pair_of_layouts(tmp_path):
    names = tuple(f"{w}-{s}" for w in (1, 2, 4) for s in STAGES)
    check_br34(str(tmp_path), dict.fromkeys((1, 2, 4), STAGES), [(w, names, STAGES) for w in (1, 2, 3, 4)])


def test_br34_a_plain_process_reads_it_whole(tmp_path):
    made = pool(4).run(br34_save, str(tmp_path), (3,))[0][3]
    shapes = fz.read_manifest(tmp_path / "4-3").shapes()
    assert {n: tuple(x.shape) for n, x in shapes.items()} == {n: tuple(x.shape) for n, x in made[0].items()}
    assert all(x.is_meta for x in shapes.values()) and shapes["step"].dtype == torch.int32
    _, _, like = make(0)
    assert not difference(everything(fz.restore(tmp_path / "4-3", like)), made[0])


# BR35, what is outside of the optimizer ----------------------------------------------------------------------------


def br35(rank, world, root):
    state, step, like = make(3)
    state, _ = step(state, batch(state.specs.mesh))
    fz.save(f"{root}/all", state)
    fz.save(f"{root}/trained", state, trainable_only=True)
    base, _, _ = make(3, seed=1)
    expected = everything(state) | {"params/frozen": everything(base)["params/frozen"]}
    whole = fz.restore(f"{root}/all", base)
    onto = fz.restore(f"{root}/trained", base)
    try:
        fz.restore(f"{root}/trained", like)
        text = "nothing raised"
    except ValueError as error:
        text = str(error)
    return everything(state), everything(whole), expected, everything(onto), text


@pytest.mark.parametrize("world", (1, 2))
def test_br35_frozen_leaves_are_saved_or_left_out_as_asked(tmp_path, world):
    for state, restored, expected, onto, text in pool(world).run(br35, str(tmp_path)):
        assert not difference(restored, state)
        assert not difference(onto, expected)
        assert "params/frozen: not read, and abstract in `like`" in text
    held = params()["frozen"].numpy().tobytes()
    parts = [held[i : i + 8] for i in range(0, len(held), 8)]
    for name, there in (("all", True), ("trained", False)):
        raw = b"".join(p.read_bytes() for p in (tmp_path / name).iterdir())
        assert [p in raw for p in parts] == [there] * len(parts), f"{name}: bytes of the frozen leaf"
    manifest = fz.read_manifest(tmp_path / "trained")
    assert manifest.left_out == ("params/frozen",) and "params/frozen" not in manifest.leaves


# BR37 --------------------------------------------------------------------------------------------------------------


def br37_tree(kind):
    tree = {"same": torch.ones(3), "layers": (torch.ones(2), torch.zeros(2)), "shape": torch.ones(2, 2)}
    tree["dtype"] = torch.ones(2)
    if kind == "saved":
        return {**tree, "less": torch.ones(1)}
    other = {**tree, "more": torch.full((1,), 7.0), "layers": [torch.full((2,), 7.0), torch.full((2,), 7.0)]}
    return {**other, "shape": torch.full((1, 2), 7.0), "dtype": torch.full((2,), 7.0, dtype=torch.bfloat16)}


def test_br37_all_that_does_not_fit_is_one_error_and_nothing_changes(tmp_path):
    tx = fz.sgd(0.1)
    fz.save(tmp_path / "s", fz.init_state(br37_tree("saved"), tx))
    like = fz.init_state(br37_tree("target"), tx)
    before = everything(like)
    with pytest.raises(ValueError, match="does not fit") as error:
        fz.restore(tmp_path / "s", like)
    lines = str(error.value).splitlines()[1:]
    assert lines == [
        "missing: params/more",
        "unexpected: params/less",
        "params/dtype: expected bfloat16[2], the checkpoint has float32[2]",
        "params/layers: expected a list, the checkpoint has a tuple",
        "params/shape: expected float32[1,2], the checkpoint has float32[2,2]",
    ]
    assert not difference(everything(like), before)


def test_br37_the_loose_mode_loads_the_rest_and_says_what_it_left(tmp_path):
    tx = fz.sgd(0.1)
    fz.save(tmp_path / "s", fz.init_state(br37_tree("saved"), tx))
    like = fz.init_state(br37_tree("target"), tx)
    state, report = fz.restore(tmp_path / "s", like, strict=False)
    assert report.missing == ("params/more",) and report.unexpected == ("params/less",)
    assert set(report.mismatched) == {"params/shape", "params/dtype"} and set(report.nodes) == {"params/layers"}
    assert state.params["same"].tolist() == [1.0] * 3 and [x.tolist() for x in state.params["layers"]] == [
        [1, 1],
        [0, 0],
    ]
    assert state.params["more"].tolist() == [7.0] and state.params["dtype"].dtype == torch.bfloat16
    assert state.params["shape"].tolist() == [[7.0, 7.0]], "a shape is never changed by broadcasting"
    with pytest.raises(ValueError, match=r"params/more: not read, and abstract in `like`"):
        fz.restore(tmp_path / "s", fz.abstract_state(br37_tree("target"), tx), strict=False)


def test_br37_a_dtype_changes_only_where_it_is_asked_for(tmp_path):
    tx = fz.sgd(0.1)
    fz.save(tmp_path / "s", fz.init_state({"w": torch.tensor([1.0, 1 / 3]), "n": torch.tensor([1.5])}, tx))
    like = fz.init_state({"w": torch.zeros(2, dtype=torch.bfloat16), "n": torch.zeros(1)}, tx)
    state = fz.restore(tmp_path / "s", like, cast="params/w")
    assert torch.equal(state.params["w"], torch.tensor([1.0, 1 / 3]).bfloat16())
    with pytest.raises(ValueError, match=r"params/w: expected bfloat16\[2\]"):
        fz.restore(tmp_path / "s", like, cast="params/n")
    with pytest.raises(ValueError, match="matches no leaf"):
        fz.restore(tmp_path / "s", like, cast="params/x")


def test_br37_a_part_can_be_selected(tmp_path):
    state, step, like = make(0)
    state, _ = step(state, batch(state.specs.mesh))
    fz.save(tmp_path / "s", state)
    base, _, _ = make(0, seed=5)
    new = fz.restore(tmp_path / "s", base, select="params/**")
    expected = everything(base) | {n: x for n, x in everything(state).items() if n.startswith("params/")}
    assert not difference(everything(new), expected)
    with pytest.raises(ValueError, match=r"opt_state/.*: not read, and abstract"):
        fz.restore(tmp_path / "s", like, select="params/**")
