"""``OffloadModel(mesh=...)`` in four processes: claims of ``mesh_worker``, beside those of two in another worker."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.offload.mesh.mesh_worker import broken_claims, names_of

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs a torch built with gloo"
)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return broken_claims(tmp_path_factory.mktemp("mesh"), "four")


@pytest.mark.parametrize("claim", names_of("four"))
def test_claim_about_ranks(broken: dict[str, str], claim: str) -> None:
    assert broken[claim] == ""
