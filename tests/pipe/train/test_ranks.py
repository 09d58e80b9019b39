"""Several processes: replicas stay equal, communicate once per window, and never wait for a rank that has ended."""

from __future__ import annotations

from typing import Any

import pytest

from tests.programs import claims_of, outputs_of_ranks

PROGRAM = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from pipe.train import TrainPipelineBase, TrainPipelineSparseDist

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    def forward(self, batch):
        output = self.body(batch)
        return output.square().mean(), output.detach()

def batches(count, of=rank):
    generator = torch.Generator().manual_seed(of)
    return [torch.randn(4, 3, generator=generator) for _ in range(count)]

def pipeline_of(model, make=TrainPipelineBase, **options):
    return make(model, torch.optim.SGD(model.parameters(), 0.1), "cpu", **options)

def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])

def assert_ranks_hold_the_same(model):
    both = [torch.empty_like(weights_of(model)) for _ in range(world)]
    dist.all_gather(both, weights_of(model))
    assert torch.equal(both[0], both[1])

def plain_loop(epochs, size):
    reference = Net()
    optimizer = torch.optim.SGD(reference.parameters(), 0.1)
    mine, other = ([b.clone() for b in batches(max(epochs), of)] for of in (0, 1))
    for epoch in epochs:
        for start in range(0, epoch, size):
            window = range(start, min(start + size, epoch))
            optimizer.zero_grad()
            for k in window:
                (sum(reference(side[k])[0] for side in (mine, other)) / 2 / len(window)).backward()
            optimizer.step()
    return reference

def replicas_equal_one_model_on_all_rows_and_communicate_once_per_window_if_they_know_its_end():
    for ahead in (None, {"load": 0, "copy": 0}):
        model, reductions = DDP(Net()), []
        def count(state, bucket):
            reductions.append(bucket.index())
            future = dist.all_reduce(bucket.buffer() / world, async_op=True).get_future()
            return future.then(lambda f: f.value()[0])
        model.register_comm_hook(None, count)
        pipeline = pipeline_of(model, grad_accum=3, ahead=ahead)
        assert len(run(pipeline, batches(7))) == 7          # two full windows and one of a single batch
        assert len(run(pipeline, batches(2))) == 2          # and a partial one of two
        assert pipeline.statistics().steps == 4
        assert ahead or len(reductions) == 4, reductions
        torch.testing.assert_close(weights_of(model), weights_of(plain_loop((7, 2), 3)), atol=1e-6, rtol=1e-6)
        assert_ranks_hold_the_same(model)

def windows_of_models_that_torch_shards_step_with_the_mean_of_their_batches_the_partial_one_included():
    # What these keep of a backward that does not reduce is in no .grad.
    mesh = init_device_mesh("cpu", (world,))
    sharded = Net()
    for layer in (sharded.body[0], sharded.body[2], sharded):
        fully_shard(layer, mesh=mesh)
    assert len(run(pipeline_of(sharded, grad_accum=3), batches(5))) == 5
    whole = FullyShardedDataParallel(Net(), use_orig_params=True, device_id=torch.device("cpu"))
    assert len(run(pipeline_of(whole, grad_accum=3), batches(5))) == 5
    found = [torch.cat([p.full_tensor().flatten() for p in sharded.parameters()])]
    with FullyShardedDataParallel.summon_full_params(whole):
        found.append(weights_of(whole))
    for weights in found:
        torch.testing.assert_close(weights.detach(), weights_of(plain_loop((5,), 3)), atol=1e-6, rtol=1e-6)

def ranks_agree_to_read_in_turn_where_one_of_them_must():
    class Dropped(Net):
        def forward(self, batch):
            return super().forward(nn.functional.dropout(batch, 0.2, self.training))
    def loader():
        for batch in batches(8):
            yield batch + torch.rand(()) if rank == 1 else batch
    torch.manual_seed(rank)
    model = DDP(Dropped())
    pipeline = pipeline_of(model, grad_accum=2)
    assert len(run(pipeline, loader())) == 8
    assert pipeline.statistics().batches_in_turn == 7
    assert_ranks_hold_the_same(model)

def one_rank_evaluates_replicas_alone_while_the_other_waits():
    model = DDP(Net())
    pipeline = pipeline_of(model)
    assert len(run(pipeline, batches(3))) == 3
    if rank == 0:
        model.eval()
        with torch.no_grad():
            assert len(run(pipeline, batches(2))) == 2
            second = pipeline_of(model)
            assert len(run(second, batches(2))) == 2
        model.train()
    dist.barrier()
    assert len(run(pipeline, batches(3))) == 3
    assert_ranks_hold_the_same(model)

def ranks_of_different_lengths_do_not_hang_but_say_which_rank_ended():
    model = DDP(Net())
    pipeline = pipeline_of(model, TrainPipelineSparseDist)
    iterator = iter(batches(3 + rank))
    for _ in range(3):
        pipeline.progress(iterator)
    try:
        pipeline.progress(iterator)
    except ValueError as error:
        message = str(error)
    assert "after 3 batches on rank(s) [0] and another batch on rank(s) [1]" in message, message
    assert len(run(pipeline, batches(2))) == 2          # and the pipeline goes on

def ranks_of_different_lengths_may_stop_with_the_shortest_and_close_its_window():
    model = DDP(Net())
    pipeline = pipeline_of(model, grad_accum=2, uneven="stop")
    assert len(run(pipeline, batches(3 + 2 * rank))) == 3
    assert pipeline.statistics().steps == 2
    assert_ranks_hold_the_same(model)
    assert len(run(pipeline, batches(2))) == 2

def a_loader_that_fails_on_one_rank_is_heard_on_all():
    def loader():
        yield from batches(2)
        if rank == 1:
            raise OSError("broken file")
        yield from batches(2)
    model = DDP(Net())
    pipeline = pipeline_of(model)
    iterator = loader()
    pipeline.progress(iterator)
    pipeline.progress(iterator)
    try:
        pipeline.progress(iterator)
    except (OSError, RuntimeError) as error:
        message = repr(error)
    assert ("OSError('broken file')" if rank else "rank(s) [1] failed at batch 2") in message, message
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return outputs_of_ranks(PROGRAM, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("claim", claims_of(PROGRAM))
def test_two_ranks(outputs: Any, claim: Any) -> None:
    assert all(f"held: {claim}" in output for output in outputs), "\n---\n".join(outputs)
