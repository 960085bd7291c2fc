"""The pool of ranks: results by rank, errors with their rank, and a fresh start after a failure."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, RankTimeout, once, pool


def total(rank, world, x):
    x = x * (rank + 1)
    if world > 1:
        dist.all_reduce(x)
    return x


def identity(rank, world):
    return os.getpid(), {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


def draw(rank, world):
    return torch.rand(3), torch.get_num_threads()


def raise_on(rank, world, bad):
    if rank == bad:
        raise ValueError(f"leaf params/w is bad on {rank}")
    dist.barrier()


def hang_on(rank, world, bad):
    if rank == bad:
        time.sleep(60)


def exit_on(rank, world, bad):
    if rank == bad:
        os._exit(7)
    return rank


def unpicklable(rank, world):
    return lambda: rank


def die_or_hang(rank, world):
    exit_on(rank, world, 1)
    time.sleep(60)


def kill_peer(rank, world):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        return "saw the loss"


@pytest.mark.parametrize("world", [1, 2])
def test_all_reduce(world):
    results = pool(world).run(total, torch.ones(3))
    assert len(results) == world
    for result in results:
        assert torch.equal(result, torch.full((3,), float(sum(range(1, world + 1)))))


def test_processes_are_kept_and_know_their_rank():
    first, second = pool(2).run(identity), pool(2).run(identity)
    assert first == second
    assert os.getpid() not in {pid for pid, _ in first}
    assert first[1][1] == {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}


def test_draws_do_not_depend_on_what_ran_before():
    before = torch.get_rng_state()
    draws = [*pool(2).run(draw), *pool(2).run(draw), *pool(1).run(draw)]
    assert all(torch.equal(values, draws[0][0]) and threads == 1 for values, threads in draws)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("world", [1, 2])
def test_an_error_names_its_rank_and_the_pool_starts_afresh(world):
    with pytest.raises(RankError, match=rf"(?s)rank {world - 1}: .*leaf params/w is bad on {world - 1}"):
        pool(world).run(raise_on, world - 1)
    assert torch.equal(pool(world).run(total, torch.ones(1))[0], torch.tensor([float(sum(range(1, world + 1)))]))


def test_a_dropped_pool_says_so():
    dropped = pool(2)
    with pytest.raises(RankError):
        dropped.run(raise_on, 0)
    with pytest.raises(ValueError, match=r"call pool\(2\) for a new one"):
        dropped.run(identity)


def test_a_timeout_kills_and_shows_where_the_rank_was():
    pids = [pid for pid, _ in pool(2).run(identity)]
    with pytest.raises(RankTimeout, match=r"(?s)rank 1: no answer; it was at.*in hang_on"):
        pool(2).run(hang_on, 1, timeout=1)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert [result.item() for result in pool(2).run(total, torch.ones(1))] == [3.0, 3.0]


def test_a_death_is_reported_at_once_with_its_exit_code():
    ranks, start = pool(2), time.monotonic()
    with pytest.raises(RankError, match="rank 1 died with exit code 7"):
        ranks.run(exit_on, 1)
    assert time.monotonic() - start < 5


def test_an_unpicklable_result_is_an_error():
    with pytest.raises(RankError, match=r"(?s)rank 0: .*pickle"):
        pool(2).run(unpicklable)


def test_once_reports_what_each_rank_did():
    survivor, dead = once(kill_peer, 2, timeout=30)
    assert survivor.ok and survivor.value == "saw the loss"
    assert dead.exitcode == -signal.SIGKILL


def test_once_times_out_although_another_rank_died():
    with pytest.raises(RankTimeout, match=r"(?s)rank 1 died with exit code 7.*rank 0: no answer.*in die_or_hang"):
        once(die_or_hang, 2, timeout=1)
