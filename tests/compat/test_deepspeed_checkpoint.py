"""Import of checkpoints that a real DeepSpeed wrote, see make_deepspeed_checkpoints: whole values bit for bit, the next
step, refusals."""

import dataclasses
import os
import pathlib
import shutil
import zipfile

import pytest
import torch
from safetensors.torch import load_file

import funzero as fz
from funzero.compat.deepspeed.checkpoint import read_checkpoint, to_state
from tests.compat import make_deepspeed_checkpoints as make
from tests.ranks import pool

DATA = make.DATA
ALL = sorted(path.name for path in DATA.iterdir())
ADAM = [name for name in ALL if not name.endswith("sgd")]
DECAYS = ["embed.weight", "up.weight", "down.weight"]
OTHERS = ["temperature", "up.bias", "down.bias"]
TRAINED = {name: name != "frozen.weight" for name in (*DECAYS, *OTHERS, "frozen.weight")}


def read(name, folder=DATA, **kwargs):
    return read_checkpoint(folder / name, names=[DECAYS, OTHERS] if "zero0" in name else None, **kwargs)


def expected(name):
    """{key: {name of the param: tensor}}"""
    out = {}
    for path, x in load_file(DATA / name / "expected.safetensors").items():
        key, _, of = path.partition("/")
        out.setdefault(key, {})[of] = x
    return out


def per_group(one):
    """An optimizer with a part for each of the two param groups; every number is wrong until it is imported."""
    labels = {name: "decay" if name in DECAYS else "rest" for name in TRAINED}
    return fz.partition({"decay": one, "rest": one}, lambda params: {name: labels[name] for name in params})


ADAMW = per_group(fz.adamw(9.0, b1=0.1, b2=0.1, eps=9.0, weight_decay=9.0))


def shapes(found):
    return {name: torch.empty(x.shape, dtype=torch.float32, device="meta") for name, x in found.params.items()}


def like(found, tx=ADAMW, **kwargs):
    return fz.abstract_state(shapes(found), tx, buffers=found.buffers, trainable=TRAINED, **kwargs)


def next_step(tx, state, want):
    """One step of the executor with the gradients that DeepSpeed had."""

    def loss_fn(params, batch):
        return sum((params[n] * g).sum() for n, g in want["grads"].items())

    state, _ = fz.make_step(loss_fn, tx, trainable=TRAINED)(state, {"x": torch.zeros(1)})
    assert not [n for n, x in want["after"].items() if (state.params[n] - x).abs().max() > 1e-6]
    assert torch.equal(state.params["frozen.weight"], want["params"]["frozen.weight"])


def same(found, want):
    assert found.keys() == want.keys()
    assert not [n for n in want if not torch.equal(found[n].float(), want[n]) or found[n].shape != want[n].shape]


def check(found, want):
    same(found.params, want["params"])
    assert not any(x.requires_grad for x in found.params.values())
    assert found.moments.keys() == want.keys() - {"params", "grads", "after"}
    for key, tree in found.moments.items():
        same(tree, want[key])
        assert all(x.dtype == torch.float32 for x in tree.values())


@pytest.mark.parametrize("name", ALL)
def test_whole_values_are_those_of_the_live_engine(name):
    found = read(name)
    check(found, expected(name))
    assert found.groups == dict.fromkeys(DECAYS, 0) | dict.fromkeys(OTHERS, 1)
    assert [(g["lr"], g["weight_decay"]) for g in found.hyperparams] == [(0.02, 0.1), (0.01, 0.0)]
    assert found.shared == {"head.weight": "embed.weight"}
    assert found.buffers["seen"].tolist() == [3, 1, 4] and found.buffers["shift"].tolist() == [0.5, -0.25, 0.125]
    assert (found.global_steps, found.skipped_steps) == (3, 0)
    # without ZeRO, DeepSpeed's low-precision optimizer makes its state by an update with zeros, which counts
    count = {"zero0_bfloat16": 4}.get(name, 3)
    assert found.step == ({} if name.endswith("sgd") else dict.fromkeys([*DECAYS, *OTHERS], count))
    low = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(name.split("_")[-1 - name.endswith("sgd")])
    assert {n for n, x in found.params.items() if x.dtype != torch.float32} == ({"frozen.weight"} if low else set())
    assert found.params["frozen.weight"].dtype == (low or torch.float32)


@pytest.mark.parametrize("name", ADAM)
def test_the_next_step_is_deepspeeds(name):
    want, found = expected(name), read(name)
    state = to_state(found, like(found), key=5)
    assert int(state.step) == 3 and state.key.tolist() == [5, 0] and state.accum == ()
    same(state.buffers, {n: x.float() for n, x in found.buffers.items()})
    next_step(ADAMW, state, want)


@pytest.mark.parametrize("name", [n for n in ALL if n.endswith("sgd")])
def test_another_optimizer_by_its_own_names(name):
    want, found = expected(name), read(name)
    tx = per_group(fz.chain(fz.add_decayed_weights(9.0), fz.sgd(9.0, momentum=0.1)))
    next_step(tx, to_state(found, like(found, tx), moments={"trace": "momentum_buffer"}), want)


def run_cut(rank, world, stage):
    found = dataclasses.replace(read("zero2_float32"), buffers={})
    specs = fz.zero_specs(shapes(found), ADAMW, fz.make_mesh(dp=-1), stage=stage, trainable=TRAINED)
    state = to_state(found, fz.abstract_state(shapes(found), ADAMW, specs=specs, trainable=TRAINED))
    sizes = sum(x.numel() for x in state.params.values())
    return sizes, fz.gather(state.params, specs.params), fz.gather(state.opt_state, specs.opt_state)


@pytest.mark.parametrize("stage", [1, 3])
def test_cut_by_the_layout_of_like(stage):
    want, found = expected("zero2_float32"), read("zero2_float32")
    whole = to_state(found, like(found))
    for size, params, opt_state in pool(2).run(run_cut, stage):
        assert (size < sum(x.numel() for x in params.values())) == (stage == 3)
        same(params, want["params"])
        assert all(map(torch.equal, fz.tree.leaves(opt_state), fz.tree.leaves(whole.opt_state)))


def test_moments_stay_float32_beside_low_params():
    found = read("zero3_bfloat16")
    found.moments["exp_avg"]["up.bias"][0] = 1 + 2**-10
    state = to_state(found, like(found, precision=fz.precision.bf16_master))
    mu = state.opt_state["rest"]["scale_by_adam"]["mu"]["up.bias"]
    assert mu.dtype == torch.float32 and float(mu[0]) == 1 + 2**-10
    assert state.params["up.bias"].dtype == torch.bfloat16
    assert torch.equal(state.opt_state["master"]["up.bias"], found.params["up.bias"])


def test_schedules_count_applied_updates():
    found = dataclasses.replace(read("zero2_float32"), global_steps=5, skipped_steps=2)
    tx = per_group(fz.adamw(fz.schedules.warmup_cosine(1.0, warmup=2, total=10)))
    state = to_state(found, like(found, tx))
    assert int(state.step) == int(state.opt_state["rest"]["scale_by_learning_rate"]["count"]) == 3


def test_loss_scale():
    found = read("zero2_float16")
    scaling = fz.loss_scale.dynamic(initial_power=3, hysteresis=2)
    scale = to_state(found, like(found, loss_scale=scaling)).loss_scale
    assert (float(scale.scale), int(scale.finite), int(scale.patience)) == (64.0, 3, 2) and scale.scaling == scaling
    found = dataclasses.replace(found, loss_scale={})
    with pytest.raises(ValueError, match="missing: loss_scale"):
        to_state(found, like(found, loss_scale=scaling))


def test_a_param_without_updates_starts_at_zero():
    found = read("zero0_float32")
    for tree in (*found.moments.values(), found.step):
        del tree["up.bias"]
    state = to_state(found, like(found)).opt_state["rest"]["scale_by_adam"]
    assert not state["nu"]["up.bias"].any() and int(state["count"]["up.bias"]) == 0 and int(state["count"]["down.bias"])


def test_what_does_not_fit_is_one_error():
    found = read("zero1_float32")
    wrong = shapes(found) | {"more": torch.ones(2), "up.bias": torch.ones(3)}
    del wrong["down.weight"]
    with pytest.raises(ValueError) as error:
        to_state(found, fz.abstract_state(wrong, fz.adamw(1.0), precision=fz.precision.bf16_master))
    lines = str(error.value).splitlines()
    assert "missing: params/more" in lines and "missing: opt_state/scale_by_adam/nu/more" in lines
    assert "missing: opt_state/scale_by_adam/mu/frozen.weight" in lines
    assert "missing: opt_state/master/more" in lines
    assert "params/up.bias: expected [3], got [7]" in lines
    assert "unexpected: params/down.weight" in lines and "unexpected: exp_avg of down.weight" in lines
    assert "unexpected: buffers/seen" in lines


def test_groups_that_differ_need_a_partition():
    found = read("zero1_float32")
    with pytest.raises(ValueError, match=r"learning_rate: the param groups say \[0.01, 0.02\]; make .* fz.partition"):
        to_state(found, like(found, fz.adamw(1.0)))
    for group in found.hyperparams:
        group["lr"] = 0.5
    state = to_state(found, like(found, fz.adamw(1.0, mask=lambda params: {n: n in DECAYS for n in params})))
    leaves = dict(zip(fz.tree.paths(state.opt_state), fz.tree.leaves(state.opt_state), strict=True))
    decay = [float(x) for n, x in leaves.items() if n.endswith("hyperparams/weight_decay")]
    assert decay == [pytest.approx(0.1)]


def test_stage_0_needs_names_for_several_groups():
    with pytest.raises(ValueError, match=r"give names=, a list for each of its 2 groups, of \[3, 3\] names"):
        read_checkpoint(DATA / "zero0_float32")
    with pytest.raises(ValueError, match=r"exp_avg of up.weight is \[11, 5\], not \[7, 5\]"):
        read_checkpoint(DATA / "zero0_float32", names=[["up.weight", "embed.weight", "down.weight"], OTHERS])


def test_hyperparams_are_the_checkpoints_where_it_has_them():
    found = read("zero1_float32")
    tx = per_group(fz.adamw(9.0, eps_root=0.25))
    old = fz.init_state(found.params, tx, buffers=found.buffers, trainable=TRAINED)
    new = to_state(found, old).opt_state["rest"]
    assert float(new["scale_by_learning_rate"]["hyperparams"]["learning_rate"]) == pytest.approx(0.01)
    numbers = {n: round(float(x), 7) for n, x in new["scale_by_adam"]["hyperparams"].items()}
    assert numbers == {"b1": 0.8, "b2": 0.95, "eps": 1e-6, "eps_root": 0.25}
    with pytest.raises(ValueError, match="missing: opt_state/rest/scale_by_adam/hyperparams/eps_root"):
        to_state(found, like(found, tx))


def copy(tmp_path, name):
    return pathlib.Path(shutil.copytree(DATA / name, tmp_path / name))


@pytest.mark.parametrize("tag", ["../x", "..", ".", "", "a/b", "/etc", "a\\b"])
def test_a_tag_stays_in_its_folder(tmp_path, tag):
    folder = copy(tmp_path, "zero1_float32")
    (tmp_path / "x").mkdir()
    for give in (tag, None):
        (folder / "latest").write_text(tag)
        with pytest.raises(ValueError, match="is not the name of a folder"):
            read_checkpoint(folder, give)
    (folder / "link").symlink_to(tmp_path / "x")
    with pytest.raises(ValueError, match="leads out of"):
        read_checkpoint(folder, "link")


def test_missing_files(tmp_path):
    folder = copy(tmp_path, "zero2_bfloat16")
    tag = folder / "global_step3"
    (tag / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(ValueError, match=r"groups of \[3\] ranks, and there are files of 2"):
        read_checkpoint(folder)
    (tag / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(ValueError, match=r"_optim_states.pt files of ranks \[0\] are missing"):
        read_checkpoint(folder)
    (tag / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"mp_rank_00_model_states.pt: there is no such file"):
        read_checkpoint(folder)
    (folder / "latest").unlink()
    with pytest.raises(FileNotFoundError, match="give tag="):
        read_checkpoint(folder)
    folder = copy(tmp_path, "universal_of_zero3_float32")
    (folder / "global_step3" / "zero" / "up.bias" / "fp32.pt").unlink()
    with pytest.raises(ValueError, match=r"no fp32.pt of up.bias"):
        read_checkpoint(folder)


def test_other_cuts_are_refused(tmp_path):
    folder = copy(tmp_path, "zero1_float32")
    tag = folder / "global_step3"
    model = torch.load(tag / "mp_rank_00_model_states.pt", weights_only=True)
    for change, text in (({"mp_world_size": 2}, "tensor-parallel"), ({"module": None}, "pipeline")):
        torch.save(model | change, tag / "mp_rank_00_model_states.pt")
        with pytest.raises(ValueError, match=text):
            read_checkpoint(folder)
    torch.save(model, tag / "mp_rank_00_model_states.pt")
    (tag / "layer_0_expert_0_mp_rank_00_model_states.pt").touch()
    with pytest.raises(ValueError, match="expert-parallel"):
        read_checkpoint(folder)


def test_frozen_params_of_tensor_parallel_ranks_are_not_whole(tmp_path):
    folder = copy(tmp_path, "universal_of_zero1_bfloat16")
    file = folder / "global_step3" / "mp_rank_00_model_states.pt"
    torch.save(torch.load(file, weights_only=True) | {"mp_world_size": 2}, file)
    with pytest.raises(ValueError, match=r"no file has all of frozen.weight"):
        read_checkpoint(folder)


def test_a_file_that_does_not_say_where_params_lie(tmp_path):
    file = copy(tmp_path, "zero1_float32") / "global_step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": {"single_partition_of_fp32_groups": []}}, file)
    with pytest.raises(ValueError, match="does not say where its params lie"):
        read_checkpoint(tmp_path / "zero1_float32")


class Evil:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("file", ["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"])
def test_nothing_in_a_file_is_run(tmp_path, file):
    path = copy(tmp_path, "zero1_float32") / "global_step3" / file
    mark = tmp_path / "mark"
    torch.save({"module": Evil(mark)}, path)
    with pytest.raises(ValueError, match=rf"{file}: refused, since it wants {os.system.__module__}.system"):
        read_checkpoint(tmp_path / "zero1_float32")
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists(), "the file is harmless, so the test says nothing"


def test_another_class_is_named_and_the_user_may_allow_it(tmp_path):
    folder = copy(tmp_path, "zero1_float32")
    path = folder / "global_step3" / "mp_rank_00_model_states.pt"
    model = torch.load(path, weights_only=True)
    torch.save(model | {"args": zipfile.ZipInfo}, path)
    with pytest.raises(ValueError, match=r"wants zipfile.ZipInfo: .* torch.serialization.safe_globals"):
        read_checkpoint(folder)
    with torch.serialization.safe_globals([zipfile.ZipInfo]):
        check(read_checkpoint(folder), expected("zero1_float32"))
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"not a file of torch.save, or cut short"):
        read_checkpoint(folder)


def test_the_classes_are_known_only_while_reading():
    read("zero1_float32")
    assert not [x for x in torch.serialization.get_safe_globals() if "deepspeed" in str(x)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero1_bfloat16", "zero3_float32"])
def test_with_the_deepspeed_that_is_installed(tmp_path, name):
    pytest.importorskip("deepspeed")
    make.write_case(name, tmp_path)
    want = {}
    for path, x in load_file(tmp_path / name / "expected.safetensors").items():
        want.setdefault(path.partition("/")[0], {})[path.partition("/")[2]] = x
    check(read(name, tmp_path), want)
