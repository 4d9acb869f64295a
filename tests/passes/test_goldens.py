"""What each pass does to a small graph, as text. `staging.stages` also checks that a second run changes nothing."""

import expecttest
import pytest
import staging
import torch
from torch import nn


@pytest.mark.skipif(
    tuple(int(n) for n in torch.__version__.split(".")[:2]) > (2, 13),
    reason="the texts hold the operators that torch 2.11 to 2.13 trace (2.14 has alias where they have detach)",
)
class TestPasses(expecttest.TestCase):
    def test_capture(self):
        step = staging.stages(*staging.tiny())["capture"]
        step.module.show_roles(step)
        self.assertExpectedInline(
            "\n".join(line for line in str(step.module).splitlines() if not line.startswith("#")),
            """\
p_0_weight: f32[3,2]  # parameter 0.weight
p_0_bias: f32[3]  # parameter 0.bias
h0_0_lr: float  # optimizer[0] group 0 lr
x_0: f32[4,2]  # batch args[0]
  t: f32[2,3] = aten.t(p_0_weight)
  addmm: f32[4,3] = aten.addmm(p_0_bias, x_0, t)
  sum_1: f32[] = aten.sum(addmm)
  ones_like: f32[] = aten.ones_like(sum_1, pin_memory=False, memory_format=preserve_format)
  expand: f32[4,3] = aten.expand(ones_like, [4, 3])
  t_1: f32[3,4] = aten.t(expand)
  mm: f32[3,2] = aten.mm(t_1, x_0)
  t_2: f32[2,3] = aten.t(mm)
  sum_2: f32[1,3] = aten.sum.dim_IntList(expand, [0], True)
  view: f32[3] = aten.view(sum_2, [3])
  reduce_0_bias: f32[3] = fsdp_fx.reduce_gradient(view, '0.bias')
  detach: f32[3] = aten.detach(reduce_0_bias)
  t_3: f32[3,2] = aten.t(t_2)
  reduce_0_weight: f32[3,2] = fsdp_fx.reduce_gradient(t_3, '0.weight')
  detach_1: f32[3,2] = aten.detach(reduce_0_weight)
  neg: float = neg(h0_0_lr)
  add_: f32[3,2] = aten.add_.Tensor(p_0_weight, detach_1, alpha=neg)
  add__1: f32[3] = aten.add_.Tensor(p_0_bias, detach, alpha=neg)
  detach_2: f32[] = aten.detach(sum_1)
return (detach_2,)
  # 0: user output 0 (local)""",
        )

    def test_place_borders(self):
        self.assertExpectedInline(
            staging.change(staging.stages(*staging.tiny()), "place_borders"),
            """\
  ...
+ gather_0_weight: f32[3,2] = fsdp_fx.gather_parameter(p_0_weight, '0.weight')
~ t: f32[2,3] = aten.t(gather_0_weight)
+ gather_0_bias: f32[3] = fsdp_fx.gather_parameter(p_0_bias, '0.bias')
~ addmm: f32[4,3] = aten.addmm(gather_0_bias, x_0, t)
  ...
> detach_2: f32[] = aten.detach(sum_1)
> detach: f32[3] = aten.detach(reduce_0_bias)
2 inserted, 0 removed, 2 changed, 2 moved, 20 unchanged
""",
        )

    def test_functionalize(self):
        found = staging.stages(*staging.tiny(dropout=True))
        self.assertExpectedInline(
            staging.change(found, "functionalize"),
            """\
  ...
~ bernoulli_: f32[4,3] = aten.bernoulli.p(empty_like, 0.5)
~ div_: f32[4,3] = aten.div.Scalar(bernoulli_, 0.5)
0 inserted, 0 removed, 2 changed, 0 moved, 29 unchanged
""",
        )

    def test_functionalize_views_and_buffers(self):
        """A write through a view and into a buffer: the view is made again, the buffer updated at the end."""
        model = nn.BatchNorm1d(2)

        def forward(model, x):
            y = model(x) * 2
            y[:, 0] = 0
            return y

        found = staging.stages(forward, model, torch.ones(4, 2))
        self.assertExpectedInline(
            staging.text(found["functionalize"]),
            """\
_tensor_constant0 = constant _tensor_constant0
add_: i64[] = aten.add.Tensor(b_num_batches_tracked, 1)
gather_weight: f32[2] = fsdp_fx.gather_parameter(p_weight, 'weight')
gather_bias: f32[2] = fsdp_fx.gather_parameter(p_bias, 'bias')
_native_batch_norm_legit_functional: (f32[4,2], f32[2], f32[2], f32[2], f32[2]) = aten._native_batch_norm_legit_functional(x_0, gather_weight, gather_bias, b_running_mean, b_running_var, True, 0.1, 1e-05)
getitem_1: f32[4,2] = _native_batch_norm_legit_functional[0]
getitem_4: f32[2] = _native_batch_norm_legit_functional[3]
native_batch_norm: f32[2] = _native_batch_norm_legit_functional[4]
mul: f32[4,2] = aten.mul.Tensor(getitem_1, 2)
lift_fresh_copy: f32[] = aten.clone(_tensor_constant0)
select: f32[4] = aten.select.int(mul, 1, 0)
fill: f32[4] = aten.fill.Tensor(select, lift_fresh_copy)
select_scatter: f32[4,2] = aten.select_scatter(mul, fill, 1, 0)
detach_2: f32[4,2] = aten.detach(select_scatter)
copy_: i64[] = aten.copy_(b_num_batches_tracked, add_)
copy__1: f32[2] = aten.copy_(b_running_mean, getitem_4)
copy__2: f32[2] = aten.copy_(b_running_var, native_batch_norm)
""",
        )

    def test_shard_parameters(self):
        self.assertExpectedInline(
            staging.change(staging.stages(*staging.tiny()), "shard_parameters"),
            """\
~ p_0_weight: f32[2,2]
~ p_0_bias: f32[2]
  ...
+ all_gather_into_tensor: f32[4,2] = _c10d_functional.all_gather_into_tensor(p_0_weight, 2, 'group')
+ wait_tensor: f32[4,2] = _c10d_functional.wait_tensor(all_gather_into_tensor)
~ gather_0_weight: f32[3,2] = aten.slice.Tensor(wait_tensor, 0, 0, 3)
  ...
+ all_gather_into_tensor_1: f32[4] = _c10d_functional.all_gather_into_tensor(p_0_bias, 2, 'group')
+ wait_tensor_1: f32[4] = _c10d_functional.wait_tensor(all_gather_into_tensor_1)
~ gather_0_bias: f32[3] = aten.slice.Tensor(wait_tensor_1, 0, 0, 3)
  ...
+ constant_pad_nd: f32[4] = aten.constant_pad_nd(view, [0, 1])
+ reduce_scatter_tensor: f32[2] = _c10d_functional.reduce_scatter_tensor(constant_pad_nd, 'avg', 2, 'group')
  ...
+ constant_pad_nd_1: f32[4,2] = aten.constant_pad_nd(t_3, [0, 0, 0, 1])
+ reduce_scatter_tensor_1: f32[2,2] = _c10d_functional.reduce_scatter_tensor(constant_pad_nd_1, 'avg', 2, 'group')
  ...
> reduce_0_bias: f32[2] = _c10d_functional.wait_tensor(reduce_scatter_tensor)
  ...
> reduce_0_weight: f32[2,2] = _c10d_functional.wait_tensor(reduce_scatter_tensor_1)
8 inserted, 0 removed, 4 changed, 2 moved, 20 unchanged
""",
        )

    def test_shard_parameters_scalar_and_empty(self):
        model = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(2.0)), "none": nn.Parameter(torch.zeros(0, 3))})

        def train_step(model, x):
            loss = (x * model["scale"]).sum() + model["none"].sum()
            loss.backward()
            return loss.detach(), [p.grad for p in model.values()]

        found = staging.stages(train_step, model, torch.ones(4))
        self.assertExpectedInline(
            staging.change(found, "shard_parameters"),
            """\
  ...
- gather_scale: f32[] = fsdp_fx.gather_parameter(p_scale, 'scale')
~ mul: f32[4] = aten.mul.Tensor(x_0, p_scale)
  ...
~ gather_none: f32[0,3] = aten.new_empty(p_none, [0, 3])
  ...
~ reduce_none: f32[0,3] = aten.new_empty(expand, [0, 3])
  ...
+ all_reduce: f32[] = _c10d_functional.all_reduce(sum_3, 'avg', 'group')
  ...
> reduce_scale: f32[] = _c10d_functional.wait_tensor(all_reduce)
1 inserted, 1 removed, 3 changed, 1 moved, 15 unchanged
""",
        )

    def test_shard_optimizer(self):
        self.assertExpectedInline(
            staging.change(staging.stages(*staging.tiny()), "shard_optimizer"),
            """\
  ...
~ detach: f32[2] = aten.detach(reduce_0_bias)
  ...
~ detach_1: f32[2,2] = aten.detach(reduce_0_weight)
  ...
~ add_: f32[2,2] = aten.add_.Tensor(p_0_weight, detach_1, alpha=neg)
~ add__1: f32[2] = aten.add_.Tensor(p_0_bias, detach, alpha=neg)
0 inserted, 0 removed, 4 changed, 0 moved, 30 unchanged
""",
        )

    def test_shard_optimizer_norm(self):
        model = nn.Linear(2, 4, bias=False)

        def train_step(model, x):
            model(x).sum().backward()
            return nn.utils.clip_grad_norm_(model.parameters(), 1.0)

        found = staging.stages(train_step, model, torch.ones(4, 2))
        self.assertExpectedInline(
            staging.change(found, "shard_optimizer"),
            """\
  ...
~ detach: f32[2,2] = aten.detach(reduce_weight)
  ...
+ pow_1: f32[1] = aten.pow.Tensor_Scalar(stack, 2.0)
+ all_reduce: f32[1] = _c10d_functional.all_reduce(pow_1, 'sum', '0')
+ wait_tensor: f32[1] = _c10d_functional.wait_tensor(all_reduce)
+ pow_2: f32[1] = aten.pow.Tensor_Scalar(wait_tensor, 0.5)
~ linalg_vector_norm_1: f32[] = aten.linalg_vector_norm(pow_2, 2.0)
  ...
~ mul_: f32[2,2] = aten.mul_.Tensor(detach, clamp)
4 inserted, 0 removed, 3 changed, 0 moved, 22 unchanged
""",
        )

    def test_shard_optimizer_whole_matrices(self):
        """What DTensor cannot do on rows (a product with the transpose) is gathered; padding is cut off first."""
        model = nn.Linear(2, 3, bias=False)

        def train_step(model, x):
            model(x).sum().backward()
            grad = model.weight.grad
            with torch.no_grad():
                model.weight -= grad @ (grad.T @ grad)

        found = staging.stages(train_step, model, torch.ones(4, 2))
        self.assertExpectedInline(
            staging.change(found, "shard_optimizer"),
            """\
  ...
~ detach: f32[2,2] = aten.detach(reduce_weight)
+ all_gather_into_tensor_1: f32[4,2] = _c10d_functional.all_gather_into_tensor(detach, 2, 'group')
+ wait_tensor_1: f32[4,2] = _c10d_functional.wait_tensor(all_gather_into_tensor_1)
+ slice_1: f32[3,2] = aten.slice.Tensor(wait_tensor_1, 0, 0, 3)
~ permute: f32[2,3] = aten.permute(slice_1, [1, 0])
~ mm_2: f32[2,2] = aten.mm(permute, slice_1)
~ mm_3: f32[3,2] = aten.mm(slice_1, mm_2)
+ constant_pad_nd_1: f32[4,2] = aten.constant_pad_nd(mm_3, [0, 0, 0, 1])
+ slice_2: f32[2,2] = aten.slice.Tensor(constant_pad_nd_1, 0, 0, 2)
~ sub_: f32[2,2] = aten.sub_.Tensor(p_weight, slice_2)
5 inserted, 0 removed, 5 changed, 0 moved, 18 unchanged
""",
        )

    def test_bucket(self):
        self.assertExpectedInline(
            staging.change(staging.stages(*staging.tiny(4)), "bucket"),
            """\
  ...
- all_gather_into_tensor: f32[4,2] = _c10d_functional.all_gather_into_tensor(p_0_weight, 2, 'group')
+ storage_f32: f32[8]
+ slice_1: f32[8] = aten.slice.Tensor(storage_f32, 0, 0, 8)
+ all_gather_into_tensor_2: f32[16] = _c10d_functional.all_gather_into_tensor(slice_1, 2, 'group')
+ wait_tensor: f32[16] = _c10d_functional.wait_tensor(all_gather_into_tensor_2)
+ view_1: f32[2,8] = aten.view(wait_tensor, [2, 8])
+ split_with_sizes_copy: (f32[2,4], f32[2,2], f32[2,2]) = aten.split_with_sizes_copy(view_1, [4, 2, 2], 1)
+ getitem: f32[2,4] = split_with_sizes_copy[0]
~ gather_0_weight: f32[4,2] = aten.view(getitem, [4, 2])
+ getitem_1: f32[2,2] = split_with_sizes_copy[1]
> gather_0_bias: f32[4] = aten.view(getitem_1, [4])
  ...
- all_gather_into_tensor_1: f32[4] = _c10d_functional.all_gather_into_tensor(p_0_bias, 2, 'group')
  ...
- reduce_scatter_tensor: f32[2] = _c10d_functional.reduce_scatter_tensor(view, 'avg', 2, 'group')
  ...
- reduce_scatter_tensor_1: f32[2,2] = _c10d_functional.reduce_scatter_tensor(t_3, 'avg', 2, 'group')
+ chunk_cat: f32[2,6] = aten._chunk_cat([t_3, view], 0, 2)
+ view_4: f32[12] = aten.view(chunk_cat, [12])
+ reduce_scatter_tensor_2: f32[6] = _c10d_functional.reduce_scatter_tensor(view_4, 'avg', 2, 'group')
  ...
+ wait_tensor_1: f32[6] = _c10d_functional.wait_tensor(reduce_scatter_tensor_2)
+ split_with_sizes: (f32[4], f32[2]) = aten.split_with_sizes(wait_tensor_1, [4, 2])
+ getitem_2: f32[4] = split_with_sizes[0]
> reduce_0_weight: f32[2,2] = aten.view(getitem_2, [2, 2])
+ getitem_3: f32[2] = split_with_sizes[1]
~ reduce_0_bias: f32[2] = aten.view(getitem_3, [2])
15 inserted, 4 removed, 2 changed, 2 moved, 22 unchanged
""",
        )

    def test_schedule(self):
        from fsdp_fx.passes import bucket

        bytes_before, bucket.BUCKET_BYTES = bucket.BUCKET_BYTES, 1  # every parameter a bucket of its own
        try:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))

            def train_step(model, x):
                model(x).sum().backward()
                return [p.grad for p in model.parameters()]

            found = staging.stages(train_step, model, torch.ones(4, 2))
        finally:
            bucket.BUCKET_BYTES = bytes_before
        self.assertExpectedInline(
            staging.change(found, "schedule"),
            """\
  ...
> all_gather_into_tensor_1: f32[2,2] = _c10d_functional.all_gather_into_tensor(p_1_weight, 2, 'group')
  ...
> all_gather_into_tensor_2: f32[2,2] = _c10d_functional.all_gather_into_tensor(p_2_weight, 2, 'group')
  ...
> reduce_2_weight: f32[1,2] = _c10d_functional.wait_tensor(reduce_scatter_tensor)
0 inserted, 0 removed, 0 changed, 3 moved, 42 unchanged
""",
        )

    def test_lower(self):
        self.assertExpectedInline(
            staging.change(staging.stages(*staging.tiny(4)), "lower"),
            """\
  ...
- reduce_scatter_tensor_2: f32[6] = _c10d_functional.reduce_scatter_tensor(view_4, 'avg', 2, 'group')
+ all_to_all_single: f32[12] = _c10d_functional.all_to_all_single(view_4, [6, 6], [6, 6], 'group')
  ...
+ wait_tensor_2: f32[12] = _c10d_functional.wait_tensor(all_to_all_single)
+ view_5: f32[2,6] = aten.view(wait_tensor_2, [2, 6])
~ wait_tensor_1: f32[6] = aten.mean.dim(view_5, [0])
3 inserted, 1 removed, 1 changed, 0 moved, 39 unchanged
""",
        )

    def test_lower_leaves_other_backends_alone(self):
        found = staging.stages(*staging.tiny(4), backend="nccl")
        assert staging.change(found, "lower").startswith("0 inserted, 0 removed, 0 changed, 0 moved")

    def test_world_of_one(self):
        """No collective, no copy of a parameter, and a gradient is copied only where somebody else sees it."""
        found = staging.stages(*staging.tiny(), world=1)
        self.assertExpectedInline(
            staging.text(found["lower"]),
            """\
t: f32[2,3] = aten.t(p_0_weight)
addmm: f32[4,3] = aten.addmm(p_0_bias, x_0, t)
sum_1: f32[] = aten.sum(addmm)
ones_like: f32[] = aten.ones_like(sum_1, pin_memory=False, memory_format=preserve_format)
expand: f32[4,3] = aten.expand(ones_like, [4, 3])
t_1: f32[3,4] = aten.t(expand)
mm: f32[3,2] = aten.mm(t_1, x_0)
t_2: f32[2,3] = aten.t(mm)
sum_2: f32[1,3] = aten.sum.dim_IntList(expand, [0], True)
reduce_0_bias: f32[3] = aten.view(sum_2, [3])
reduce_0_weight: f32[3,2] = aten.t(t_2)
detach_2: f32[] = aten.detach(sum_1)
detach: f32[3] = aten.detach(reduce_0_bias)
detach_1: f32[3,2] = aten.detach(reduce_0_weight)
neg: float = neg(h0_0_lr)
add_: f32[3,2] = aten.add_.Tensor(p_0_weight, detach_1, alpha=neg)
add__1: f32[3] = aten.add_.Tensor(p_0_bias, detach, alpha=neg)
""",
        )
