"""Step graphs pass by pass, in a simulated world, for golden tests."""

import torch

from fsdp_fx import PASSES, simulated_world
from fsdp_fx.capture import capture
from fsdp_fx.optimizers import rebind_optimizers
from fsdp_fx.printing import diff
from fsdp_fx.storage import ShardedModel
from fsdp_fx.verify import verify


def stages(train_step, model, *batch, world=2, backend="gloo"):
    """{stage name: StepGraph} from capture to the last pass, each verified."""
    with simulated_world(world) as mesh:
        sharded = ShardedModel(model, mesh)
        rebind_optimizers(sharded)
        sharded.release_replaced()
        step = capture(train_step, model, batch, {}, sharded).step
        step.group, step.backend, step.mesh = "group", backend, mesh
        step.properties = frozenset({"captured"})
        verify(step, "capture")
        found = {"capture": step}
        for one in PASSES:
            after = one(step.copy())
            verify(after, one.name, step)
            again = one(after.copy())
            changes = diff(after.graph, again.graph).splitlines()
            assert changes == [f"0 inserted, 0 removed, 0 changed, 0 moved, {len(after.graph.nodes)} unchanged"], (
                changes
            )
            assert [str(d) for d in again.decisions] == [str(d) for d in after.decisions]
            found[one.name] = step = after
    return found


def change(found, name):
    """The readable diff that one pass made."""
    names = list(found)
    return diff(found[names[names.index(name) - 1]].graph, found[name].graph, context=0)


def text(step, domain=None):
    """A graph's nodes, of one domain if asked, without origins."""
    from fsdp_fx.printing import node_text

    nodes = [n for n in step.graph.nodes if n.op not in ("placeholder", "output")]
    return "\n".join(node_text(n) for n in nodes if domain in (None, n.meta["domain"])) + "\n"


def tiny(rows=3, dropout=False):
    """A Linear(2, rows) without surprises, SGD, and a step."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(2, rows)]
    if dropout:
        layers.append(torch.nn.Dropout(0.5))
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(model, x):
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return train_step, model, torch.ones(4, 2)
