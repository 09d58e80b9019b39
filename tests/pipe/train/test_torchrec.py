"""The protocol for real: torchrec's sharded modules in our pipeline, on one and on two gloo processes.

torchrec wants an environment of its own; ``tests/pipe/train/with_torchrec.sh`` makes one and runs these tests in it.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.programs import claims_of, outputs_of_ranks

HAS_TORCHREC = all(importlib.util.find_spec(name) is not None for name in ("torchrec", "fbgemm_gpu"))
pytestmark = [
    pytest.mark.torchrec,
    pytest.mark.skipif(
        not HAS_TORCHREC, reason="needs torchrec and fbgemm-gpu-cpu (tests/pipe/train/with_torchrec.sh)"
    ),
]

PROGRAM = """
warnings.simplefilter("ignore")
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
from tests.pipe.train.conftest import Lab
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

def weights(model):
    return {name: value if isinstance(value, torch.Tensor) and not hasattr(value, "local_shards")
            else [shard.tensor for shard in value.local_shards()]
            for name, value in model.state_dict().items()}

def assert_all_ran_ahead(pipeline):
    assert pipeline.statistics().undistributed == {}, pipeline.statistics()

SHARDINGS = [("table_wise", "row_wise"), ("row_wise", "column_wise"), ("table_wise", "data_parallel")]

def check(make, sharding, processors=None, size=1):
    model, optimizer = build(processors, sharding, fused=False)
    reference, reference_optimizer = build(processors, sharding, fused=False)
    before = copy.deepcopy(weights(model))
    pipeline = make(model, optimizer, CPU, grad_accum=size)
    expected = Lab().plain_loop(reference, [batches(7)], size, reference_optimizer)
    torch.testing.assert_close(run(pipeline, batches(7)), expected, atol=1e-6, rtol=1e-6)
    after = weights(model)
    torch.testing.assert_close(after, weights(reference), atol=1e-6, rtol=1e-6)
    trained = [not torch.equal(before[name], after[name]) for name in after if "position_weight" in name]
    assert all(trained) and bool(trained) == bool(processors)
    assert_all_ran_ahead(pipeline)

def losses_equal_those_of_torchrecs_own_pipeline_step_by_step():
    for sharding in SHARDINGS[:2]:
        theirs = run(TorchrecPipeline(*build(sharding=sharding), CPU), batches(8))
        for make in (TrainPipelineSparseDist, PrefetchTrainPipelineSparseDist):
            ours = make(*build(sharding=sharding), CPU)
            torch.testing.assert_close(run(ours, batches(8)), theirs, atol=0, rtol=0)
            assert_all_ran_ahead(ours)

def weights_and_outputs_equal_a_plain_loop_under_every_sharding():
    for sharding in SHARDINGS:
        for size in (1, 3):
            check(TrainPipelineSparseDist, sharding, size=size)

def feature_processors_are_applied_and_trained():
    for processors in ("modules", "collection"):
        for sharding in SHARDINGS[:2]:
            check(TrainPipelineSparseDist, sharding, processors)

def prefetching_equals_a_plain_loop_and_calls_each_prefetch_once():
    calls = []
    def noting(*arguments, **options):
        for name, module in arguments[0].named_modules():
            if callable(getattr(module, "prefetch", None)):
                plain = module.prefetch
                def noted(plain=plain, **arguments):
                    assert sorted(arguments) == ["ctx", "dist_input", "forward_stream"]
                    calls.append(arguments["forward_stream"])
                    plain(**arguments)
                module.prefetch = noted
        return PrefetchTrainPipelineSparseDist(*arguments, **options)
    for sharding in SHARDINGS[:2]:
        for processors in (None, "modules"):
            check(noting, sharding, processors)
    assert calls == [None] * 6 * 4, calls

def evaluation_equals_that_of_torchrecs_own_pipeline():
    for sharding in SHARDINGS[:2]:
        (theirs, _), (ours, _) = build(sharding=sharding), build(sharding=sharding)
        before = copy.deepcopy(weights(ours))
        with torch.no_grad():
            theirs = TorchrecEvalPipeline(theirs.eval(), torch.optim.SGD(theirs.parameters()), CPU)
            expected = run(theirs, batches(6))
            pipeline = EvalPipelineSparseDist(ours.eval(), None, CPU)
            torch.testing.assert_close(run(pipeline, batches(6)), expected, atol=0, rtol=0)
        assert_all_ran_ahead(pipeline)
        torch.testing.assert_close(weights(ours), before, atol=0, rtol=0)

def later_arguments_mean_what_they_mean_in_torchrec():
    runs = []
    for make in (TorchrecPipeline, TrainPipelineSparseDist):
        (model, optimizer), log = build(), []
        def forward(batch):
            log.append(float(batch.labels.sum()))
            losses, output = model(batch)
            return losses * 2, output
        pipeline = make(model, optimizer, CPU, execute_all_batches=False, custom_model_fwd=forward,
                        enqueue_batch_after_forward=False)
        data = batches(7)
        run(pipeline, data[:5])       # two are left in flight
        run(pipeline, data[5:])       # and run before those of the next iterator
        pipeline.reset()                   # the others are dropped
        outputs = run(pipeline, batches(4))
        runs.append((log, outputs))
    assert len(runs[0][0]) == 3 + 2 + 2, runs[0][0]
    torch.testing.assert_close(runs[1], runs[0], atol=0, rtol=0)

def a_model_detached_and_attached_in_mid_epoch_trains_as_in_torchrec():
    runs = []
    for make in (TorchrecPipeline, TrainPipelineSparseDist):
        model, optimizer = build()
        untouched = {name: set(vars(module)) for name, module in model.named_modules()}
        pipeline, iterator, outputs = make(model, optimizer, CPU), iter(batches(8)), []
        for k in range(8):
            outputs.append(pipeline.progress(iterator))
            if k in (2, 4):
                detached = pipeline.detach()
                assert detached is model
                if make is TrainPipelineSparseDist:
                    assert {name: set(vars(module)) for name, module in model.named_modules()} == untouched
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
"""


@pytest.fixture(scope="module", params=[1, 2], ids=["one_process", "two_processes"])
def outputs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return outputs_of_ranks(PROGRAM, request.param, tmp_path_factory.mktemp("torchrec"))


@pytest.mark.parametrize("claim", claims_of(PROGRAM))
def test_torchrec(outputs: Any, claim: Any) -> None:
    assert all(f"held: {claim}" in output for output in outputs), "\n---\n".join(outputs)
