"""The protocol for real: torchrec's sharded modules in our pipeline, on one and on two gloo processes.

torchrec wants an environment of its own; ``tests/pipe/train/with_torchrec.sh`` makes one and runs these tests in it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest

HAS_TORCHREC = all(importlib.util.find_spec(name) is not None for name in ("torchrec", "fbgemm_gpu"))
pytestmark = [
    pytest.mark.torchrec,
    pytest.mark.skipif(
        not HAS_TORCHREC, reason="needs torchrec and fbgemm-gpu-cpu (tests/pipe/train/with_torchrec.sh)"
    ),
]

PROGRAM = """
import copy, logging, os, sys, traceback, warnings
logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
from torch import nn
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=world)
import torchrec
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise, construct_module_sharding_plan, data_parallel, row_wise, table_wise)
from torchrec.distributed.types import ShardingPlan
from torchrec.streamable import Pipelineable
from torchrec.distributed.train_pipeline import EvalPipelineSparseDist as TorchrecEvalPipeline
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist as TorchrecPipeline
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import PositionWeightedModule, PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from dataclasses import dataclass
from pipe.train import EvalPipelineSparseDist, PrefetchTrainPipelineSparseDist, TrainPipelineSparseDist
CPU = torch.device("cpu")

@dataclass
class Batch(Pipelineable):
    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    labels: torch.Tensor
    def to(self, device, non_blocking=False):
        return Batch(*(part.to(device, non_blocking=non_blocking) for part in (self.dense, self.sparse, self.labels)))
    def record_stream(self, stream):
        for part in (self.dense, self.sparse, self.labels):
            part.record_stream(stream)

def batches(count, rows=6):
    generator = torch.Generator().manual_seed(10 + rank)
    result = []
    for _ in range(count):
        lengths = torch.randint(0, 4, (2 * rows,), generator=generator)
        values = torch.randint(0, 40, (int(lengths.sum()),), generator=generator)
        kjt = KeyedJaggedTensor(keys=["f0", "f1"], values=values, lengths=lengths)
        dense = torch.randn(rows, 5, generator=generator)
        result.append(Batch(dense, kjt, torch.randn(rows, generator=generator)))
    return result

class Model(nn.Module):
    def __init__(self, processors):
        super().__init__()
        torch.manual_seed(0)
        tables = [EmbeddingBagConfig(name=f"t{k}", embedding_dim=8, num_embeddings=40, feature_names=[f"f{k}"])
                  for k in range(2)]
        self.ebc = EmbeddingBagCollection(device=CPU, tables=tables, is_weighted=processors is not None)
        if processors == "modules":
            processors = {f"f{k}": PositionWeightedModule(max_feature_length=10, device=CPU) for k in range(2)}
        elif processors == "collection":
            processors = PositionWeightedModuleCollection({"f0": 10, "f1": 10}, device=CPU)
        if processors is not None:
            self.ebc = FeatureProcessedEmbeddingBagCollection(self.ebc, processors)
        self.bottom = nn.Sequential(nn.Linear(5, 8), nn.Tanh())
        self.top = nn.Linear(24, 1)

    def forward(self, batch):
        pooled = self.ebc(batch.sparse)
        together = torch.cat([self.bottom(batch.dense), pooled["f0"], pooled["f1"]], 1)
        predictions = self.top(together).squeeze(1)
        losses = (predictions - batch.labels) ** 2
        return losses.mean(), (losses.detach(), predictions.detach())

def build(processors=None, sharding=("table_wise", "table_wise"), fused=True):
    model = Model(processors)
    if fused:
        tables = [p for name, p in model.named_parameters() if "embedding_bags" in name]
        apply_optimizer_in_backward(torch.optim.SGD, tables, {"lr": 0.05})
    sharders = [FeatureProcessedEmbeddingBagCollectionSharder(), EmbeddingBagCollectionSharder()]
    sharder = sharders[0] if processors else sharders[1]
    make = {"table_wise": lambda k: table_wise(rank=k % world), "row_wise": lambda k: row_wise(),
            "column_wise": lambda k: column_wise(ranks=list(range(world))), "data_parallel": lambda k: data_parallel()}
    tables = construct_module_sharding_plan(
        model.ebc, {f"t{k}": make[sharding[k]](k) for k in range(2)}, sharder=sharder,
        local_size=world, world_size=world, device_type="cpu")
    for table in tables.values():
        if not fused:
            table.compute_kernel = EmbeddingComputeKernel.DENSE.value
    plan = ShardingPlan(plan={"ebc": tables})
    model = DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters()
                                 if not (fused and "embedding_bags" in name)], lr=0.05)
    return model, optimizer

def progress(pipeline, batches, times=1):
    outputs = []
    for _ in range(times):
        iterator = iter(batches)
        while True:
            try:
                outputs.append(pipeline.progress(iterator))
            except StopIteration:
                break
    return outputs

def plain_loop(model, optimizer, batches, size=1):
    outputs = []
    for start in range(0, len(batches), size):
        window = batches[start:start + size]
        optimizer.zero_grad()
        for batch in window:
            loss, output = model(batch)
            (loss / len(window)).backward()
            outputs.append(output)
        optimizer.step()
    return outputs

def weights(model):
    return {name: value if isinstance(value, torch.Tensor) and not hasattr(value, "local_shards")
            else [shard.tensor for shard in value.local_shards()]
            for name, value in model.state_dict().items()}

def assert_all_ran_ahead(pipeline):
    assert pipeline.statistics().undistributed == {}, pipeline.statistics()

SHARDINGS = [("table_wise", "row_wise"), ("row_wise", "column_wise"), ("table_wise", "data_parallel")]

def losses_equal_those_of_torchrecs_own_pipeline_step_by_step():
    for sharding in SHARDINGS[:2]:
        theirs = TorchrecPipeline(*build(sharding=sharding), CPU)
        ours = TrainPipelineSparseDist(*build(sharding=sharding), CPU)
        data = batches(8)
        torch.testing.assert_close(progress(ours, data), progress(theirs, data), atol=0, rtol=0)
        assert_all_ran_ahead(ours)

def weights_and_outputs_equal_a_plain_loop_under_every_sharding():
    for sharding in SHARDINGS:
        for size in (1, 3):
            model, optimizer = build(sharding=sharding, fused=False)
            reference, reference_optimizer = build(sharding=sharding, fused=False)
            pipeline = TrainPipelineSparseDist(model, optimizer, CPU, grad_accum=size)
            expected = plain_loop(reference, reference_optimizer, batches(7), size)
            torch.testing.assert_close(progress(pipeline, batches(7)), expected, atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(weights(model), weights(reference), atol=1e-6, rtol=1e-6)
            assert_all_ran_ahead(pipeline)

def feature_processors_are_applied_and_trained():
    for processors in ("modules", "collection"):
        for sharding in SHARDINGS[:2]:
            model, optimizer = build(processors, sharding, fused=False)
            reference, reference_optimizer = build(processors, sharding, fused=False)
            before = copy.deepcopy({name: p for name, p in weights(model).items() if "position_weight" in name})
            pipeline = TrainPipelineSparseDist(model, optimizer, CPU)
            expected = plain_loop(reference, reference_optimizer, batches(6))
            torch.testing.assert_close(progress(pipeline, batches(6)), expected, atol=1e-6, rtol=1e-6)
            after = weights(model)
            torch.testing.assert_close(after, weights(reference), atol=1e-6, rtol=1e-6)
            assert before and all(not torch.equal(value, after[name]) for name, value in before.items())
            assert_all_ran_ahead(pipeline)

def two_epochs_run_every_batch_and_detach_gives_the_model_back():
    model, optimizer = build()
    untouched = {name: set(vars(module)) for name, module in model.named_modules()}
    pipeline = TrainPipelineSparseDist(model, optimizer, CPU)
    assert len(progress(pipeline, batches(4), times=2)) == 8
    assert pipeline.detach() is model
    assert {name: set(vars(module)) for name, module in model.named_modules()} == untouched
    model(batches(1)[0])

def prefetching_equals_a_plain_loop_and_the_pipeline_that_prefetches_nothing():
    for sharding in SHARDINGS[:2]:
        for processors in (None, "modules"):
            model, optimizer = build(processors, sharding, fused=False)
            reference, reference_optimizer = build(processors, sharding, fused=False)
            calls = []
            for name, module in model.named_modules():
                if callable(getattr(module, "prefetch", None)):
                    plain = module.prefetch
                    def noted(plain=plain, **arguments):
                        assert sorted(arguments) == ["ctx", "dist_input", "forward_stream"]
                        calls.append(arguments["forward_stream"])
                        plain(**arguments)
                    module.prefetch = noted
            pipeline = PrefetchTrainPipelineSparseDist(model, optimizer, CPU)
            expected = plain_loop(reference, reference_optimizer, batches(7))
            torch.testing.assert_close(progress(pipeline, batches(7)), expected, atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(weights(model), weights(reference), atol=1e-6, rtol=1e-6)
            assert_all_ran_ahead(pipeline)
            assert calls == [None] * 6, calls
        ours = TrainPipelineSparseDist(*build(sharding=sharding), CPU)
        prefetching = PrefetchTrainPipelineSparseDist(*build(sharding=sharding), CPU)
        torch.testing.assert_close(progress(prefetching, batches(8)), progress(ours, batches(8)), atol=0, rtol=0)

def evaluation_equals_that_of_torchrecs_own_pipeline():
    for sharding in SHARDINGS[:2]:
        (theirs, _), (ours, _) = build(sharding=sharding), build(sharding=sharding)
        before = copy.deepcopy(weights(ours))
        with torch.no_grad():
            theirs = TorchrecEvalPipeline(theirs.eval(), torch.optim.SGD(theirs.parameters()), CPU)
            expected = progress(theirs, batches(6))
            pipeline = EvalPipelineSparseDist(ours.eval(), None, CPU)
            torch.testing.assert_close(progress(pipeline, batches(6)), expected, atol=0, rtol=0)
        assert_all_ran_ahead(pipeline)
        torch.testing.assert_close(weights(ours), before, atol=0, rtol=0)

def later_arguments_mean_what_they_mean_in_torchrec():
    def forwards(model, log):
        def forward(batch):
            log.append(float(batch.labels.sum()))
            losses, output = model(batch)
            return losses * 2, output
        return forward
    runs = []
    for make in (TorchrecPipeline, TrainPipelineSparseDist):
        model, optimizer = build()
        log = []
        pipeline = make(model, optimizer, CPU, execute_all_batches=False, custom_model_fwd=forwards(model, log),
                        enqueue_batch_after_forward=False)
        data = batches(7)
        progress(pipeline, data[:5])       # two are left in flight
        progress(pipeline, data[5:])       # and run before those of the next iterator
        pipeline.reset()                   # the others are dropped
        outputs = progress(pipeline, batches(4))
        runs.append((log, outputs))
    assert len(runs[0][0]) == 3 + 2 + 2, runs[0][0]
    torch.testing.assert_close(runs[1], runs[0], atol=0, rtol=0)

def a_model_detached_and_attached_in_mid_epoch_trains_as_in_torchrec():
    runs = []
    for make in (TorchrecPipeline, TrainPipelineSparseDist):
        model, optimizer = build()
        pipeline, iterator, outputs = make(model, optimizer, CPU), iter(batches(8)), []
        for k in range(8):
            outputs.append(pipeline.progress(iterator))
            if k in (2, 4):
                detached = pipeline.detach()
                assert detached is model
                with torch.no_grad():
                    outputs.append(detached(batches(1)[0])[1])
                if k == 2:
                    pipeline.attach(detached)
        runs.append(outputs)
    torch.testing.assert_close(runs[1], runs[0], atol=0, rtol=0)

def a_fused_optimizer_is_refused_where_it_would_step_on_every_micro_batch():
    model, optimizer = build(fused=True)
    try:
        TrainPipelineSparseDist(model, optimizer, CPU, grad_accum=2)
    except ValueError as error:
        assert "fused optimizer" in str(error) and "ebc" in str(error), error
    else:
        raise AssertionError("accepted")

for name in sys.argv[2:]:
    try:
        globals()[name]()
        print("held:", name, flush=True)
    except BaseException:
        print("broken:", name, traceback.format_exc(), flush=True)
        break
dist.destroy_process_group()
"""

CLAIMS = [
    "losses_equal_those_of_torchrecs_own_pipeline_step_by_step",
    "weights_and_outputs_equal_a_plain_loop_under_every_sharding",
    "feature_processors_are_applied_and_trained",
    "two_epochs_run_every_batch_and_detach_gives_the_model_back",
    "prefetching_equals_a_plain_loop_and_the_pipeline_that_prefetches_nothing",
    "evaluation_equals_that_of_torchrecs_own_pipeline",
    "later_arguments_mean_what_they_mean_in_torchrec",
    "a_model_detached_and_attached_in_mid_epoch_trains_as_in_torchrec",
    "a_fused_optimizer_is_refused_where_it_would_step_on_every_micro_batch",
]


@pytest.fixture(scope="module", params=[1, 2], ids=["one_process", "two_processes"])
def outputs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What so many ranks print that put every claim to the test."""
    store = tmp_path_factory.mktemp("torchrec") / "store"
    world, processes = request.param, []
    for rank in range(world):
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        env = {**os.environ, **{key: str(value) for key, value in ranks.items()}, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", PROGRAM, str(store), *CLAIMS]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        processes.append(subprocess.Popen(command, env=env, text=True, **streams))
    try:
        return [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("claim", CLAIMS)
def test_torchrec(outputs: Any, claim: Any) -> None:
    assert all(f"held: {claim}" in output for output in outputs), "\n---\n".join(outputs)
