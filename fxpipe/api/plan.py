"""`fxpipe.plan`: stages, devices, replicas and schedule for the fastest step that fits in memory.

model ─profile─▶ ModelProfile ─layers─▶ Chain ─planner─▶ HybridPlan ─as_plan─▶ Plan
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Never

from torch import nn

from fxpipe.errors import PlanError, UnfinishedSearchWarning, warn
from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.cluster.device_kinds import other_kinds
from fxpipe.ir.graph.graph import op_name
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.plan.hybrid_plan import HybridPlan
from fxpipe.ir.plan.layer_chain import Chain, beside, scaled, slower
from fxpipe.ir.plan.model_states import OPTIMIZER_SHARDINGS, adam_copies, counted
from fxpipe.ir.plan.plan import Plan, StagePlan
from fxpipe.ir.plan.profile import Profile
from fxpipe.ir.plan.stage_ways import Way
from fxpipe.ir.units import count, show_seconds
from fxpipe.pipe.build.call_binding import as_call
from fxpipe.pipe.options.option_forms import check as check_values
from fxpipe.pipe.options.option_table import PLAN, read_cluster
from fxpipe.pipe.options.unknown_options import refuse_unknown
from fxpipe.pipe.progress import timed, working
from fxpipe.pipe.results.find_plan import find_plan, most_sharding
from fxpipe.pipe.results.planned import Planned, SampleWork
from fxpipe.planning.hybrid.group_layers import MOST, Layers, as_plan, costed, layers
from fxpipe.planning.hybrid.plan_request import Answer, Request, check, work_bound
from fxpipe.profiling import on_kinds
from fxpipe.profiling.estimate import model_products
from fxpipe.schedules.make_schedule import AUTO, LOOPED, SPLIT, STRAIGHT

from .cheaper_cuts import cheaper_cuts, fits
from .plan_ways import with_ways
from .profile import ModelProfile, profile
from .tensor_parallel import Candidate, candidates_of, degrees_of, shardings_of, with_less_memory

# The warm-up of the plan behind a schedule.
WARMUPS = {"1f1b": "early", "1f1b-late": "late"}
SIZES = 8  # of micro-batches that a model is profiled for


def plan(
    what: nn.Module | Profile | Chain | Mapping[str, Profile | Chain],
    cluster: Cluster | str,
    batch_size: int,
    *,
    example_inputs: Any = None,
    planner: str = "optimal",
    micro_batches: int | Literal["auto"] = "auto",
    tensor_parallel: int | str | Sequence[int] = 1,
    schedule: str | None = None,
    stages_per_device: int | Literal["auto"] = "auto",
    recompute: bool | Literal["auto"] = "auto",
    all_reduce: str = "end",
    parameter_copies: float | None = None,
    optimizer_sharding: str = "none",
    dtype: str | None = None,
    most_layers: int | None = None,
    time_limit: float = 30,
    **unknown: Never,
) -> Planned:
    """The plan for training steps of `batch_size` samples on `cluster`: stages, replicas, devices, micro-batches.

    - `what`: a model, which may be on the meta device, with `example_inputs`, whose batch may have another size: costs
      are estimated for each kind of device. Or what `fxpipe.profile` returned: measured times are scaled to other kinds
      of devices, for each op by the ratio of its estimates; if the cluster lacks the device, they are used as times of
      its first device. Or a `fxpipe.Chain` of layers: without `kinds`, its times are for the first device, and are
      scaled to other kinds by `Device.flops`. Or a dict with a profile or chain for each kind of device,
      {"V100": ..., "K80": ...}; a key is a label, or its part before the colon.
    - `cluster`: a `Cluster`, or the name of a published one: "A", "B", "C" (those of DAPPLE's paper, of 16 V100s),
      "p100", "k80", "p40", "a100", "h100", "b200". "h100:64" has 64 devices, eight in a node.
    - `planner`: "optimal" (with a proven bound on its distance from the optimum), "dapple", "pipedream" (those of the
      papers), or one of three simple ones: "gpipe" (a device for each stage, stages as even as possible), "straight" (a
      device for each stage, the slowest as fast as possible), "data parallel" (one stage on all devices).
    - `micro_batches`: `chunks` of the pipe: into how many a batch is cut. "auto": the planner tries numbers that divide
      the batch; for a model only the 8 that are nearest to four per device, each with costs for its size. Each
      replica gets whole samples of a micro-batch, unless a `Chain` has `ideal_shares`.
    - `recompute`: `checkpoint` of the pipe: True ("always" for all stages), False ("never"), or "auto": "always" for
      those stages that do not fit in memory otherwise.
    - `tensor_parallel`: over how many devices of a server each op is cut: a number; or a list of numbers, of which each
      stage has the one with which the step is the fastest; or "auto": all powers of two up to the devices of a server.
      With planners other than "optimal", all stages have the same. How each op is cut is chosen so that a micro-batch
      takes the least time, or, where memory is a limit, longer with fewer bytes on each device. Above 1, the devices of
      the cluster must be of one kind.
    - `schedule`: "1f1b" or "1f1b-late"; if not given, both are tried. With "gpipe", "zb-h1" or "zb-h2", stages are
      chosen for 1F1B, and then run in the order that is named. "auto": the fastest of all five that fits, as simulated.
      "interleaved", "interleaved-late", "looped-bfs", "zb-v", "dualpipe-v": each device has several stages, and the
      layers are cut evenly for each number of replicas, of stages on a device and of micro-batches. Not with
      `tensor_parallel`.
    - `stages_per_device`: for "interleaved", "interleaved-late" and "looped-bfs"; "auto": 2 and 4 are tried.
    - `all_reduce`: replicas add up gradients at the "end" of the step, or "overlap" that with the last backward.
    - `parameter_copies`: bytes in memory for each byte of parameters, with gradients and optimizer state: 4 for Adam
      (parameter, gradient, two moments), 3 for momentum, 2 for plain SGD; 8 for Adam on parameters in bf16 or f16 with
      a master copy and moments in f32. If not given, Adam's for the types of the model's parameters, 4 for a chain.
    - `optimizer_sharding`: "zero1": the replicas of a stage share out the optimizer's state, each keeps its part (ZeRO,
      Rajbhandari et al., SC 2020), at no cost of time (section 7.2.1), see `RankPipe.replica_group`. "zero3": also
      parameters and gradients (section 5.3). Each forward and backward of a micro-batch gathers the parameters layer by
      layer, and each backward reduce-scatters their gradients, while computing waits; the largest layer is counted
      whole, with its gradient. Not with `tensor_parallel` or split backward. "auto": that of the fastest plan, and of
      equally fast ones the least: "zero3" only where memory leaves slower plans with "zero1", or none.
    - `dtype`: the element type in which a model is planned, as for `fxpipe.profile`.
    - `most_layers`: the largest number of layers that a model is divided into; stages are made of whole layers. If not
      given, 64; on more than 64 devices as many as devices, up to 128.
    - `time_limit`: seconds that "optimal" and "dapple" may search. Where DAPPLE's search does not end in that time, an
      UnfinishedSearchWarning says so, and the plan is the best that was found by then.

    Raises PlanError if there is no plan, or none that fits in memory.

    >>> import fxpipe
    >>> convs = fxpipe.Layer("convs", forward=9e-3, backward=18e-3, parameters=80e6, saved=1e9, cut=3e6)
    >>> fc = fxpipe.Layer("fc", forward=1e-3, backward=2e-3, parameters=480e6, saved=1e6)
    >>> found = fxpipe.plan(fxpipe.Chain("VGG", 32, (convs, fc)), "B", batch_size=2048)
    >>> [(stage.device, len(stage.devices)) for stage in found.plan.stages], f"{found.seconds:.2f} s"
    ([('V100:0', 11), ('V100:11', 1)], '0.24 s')
    """
    refuse_unknown("fxpipe.plan", unknown, (*PLAN, "example_inputs"))
    check_values(PLAN, locals())
    where = read_cluster(cluster)
    number, again = None if micro_batches == AUTO else micro_batches, None if recompute == AUTO else recompute
    times = None if stages_per_device == AUTO else stages_per_device
    request = Request(
        (), where, batch_size, number, WARMUPS.get(schedule or ""), again, all_reduce, parameter_copies or 4,
        time_limit, optimizer_sharding=optimizer_sharding, most_sharding=most_sharding(schedule, 1),
    )  # fmt: skip
    check(request)
    first, others = _by_kind(what, where)
    known = _profiled(first, where, example_inputs, dtype)
    told = ""
    if parameter_copies is None and isinstance(known, ModelProfile):
        own = known.parameter_bytes
        request, told = replace(request, copies=adam_copies(own)), counted(own)
    with working(f"planning {known.model} for {count(len(where.devices), 'device', 'devices')}", time_limit):
        most = most_layers or max(MOST, min(2 * MOST, len(where.devices)))
        degrees = degrees_of(tensor_parallel, where)
        if schedule in LOOPED and max(degrees) > 1:
            raise PlanError(
                f"tensor_parallel does not go with schedule={schedule!r} yet: leave out one of them, or write a "
                f"schedule with one stage on each device: {', '.join(STRAIGHT)}"
            )
        request = replace(request, most_sharding=most_sharding(schedule, max(degrees)))
        check(request)
        found, asked = _planned(known, others, planner, request, most, degrees, schedule, times)
        with timed("simulator"):
            found = replace(found, recompute=again, optimizer_sharding=optimizer_sharding, counted=told)
            return _ordered(found, asked, schedule)


def _planned(
    known: ModelProfile | Chain,
    others: Mapping[str, ModelProfile | Chain],
    planner: str,
    request: Request,
    most: int,
    degrees: Sequence[int],
    schedule: str | None,
    stages_per_device: int | None,
) -> tuple[Planned, Request]:
    """The planner's answer, and what the planner was asked; the stages of its plan have ops, unless a `Chain` was
    planned. `others` are the costs on kinds of devices where they are known; otherwise they are estimated."""
    where, about = request.cluster, (request.cluster, request.batch, planner, request.copies)

    def find(asked: Request) -> Answer:
        return _searched(planner, asked, schedule, stages_per_device)

    def order(plan: HybridPlan) -> str:
        return schedule if schedule in LOOPED else "1f1b" if plan.warmup == "early" else "1f1b-late"

    if isinstance(known, Chain):
        if degrees != (1,):
            raise PlanError("tensor_parallel is for models: nothing tells how the layers of a Chain could be cut")
        if others:
            same = {kind: scaled(one, known.batch) for kind, one in others.items() if isinstance(one, Chain)}
            known = beside(known, same)
        elif not known.kinds:
            known = _scaled(known, where)
        asked = replace(request, chains=(known,))
        answer = find(asked)
        bare = _without_ops(answer.plan, where, order(answer.plan))
        return Planned(bare, answer.plan, (Way(1, (known,)),), *about, certificate=answer.certificate), asked
    with timed("layers"):
        made = layers(known.graph, known, most)
        profiles = _sizes(known, request)

        def alone() -> tuple[Chain, ...]:
            return tuple(_on_kinds(one, others, where, made) for one in profiles)

        candidates, refused = candidates_of(profiles, made, where, degrees, alone)

    def lighter(one: Candidate) -> list[Candidate]:
        return with_less_memory(one, profiles, made, request.batch, request.copies)

    mixes = planner == "optimal" and schedule not in LOOPED
    found = with_ways(candidates, refused, request, find, mixes, lighter)
    plan, own = found.answer.plan, sorted({stage.way for stage in found.answer.plan.stages})
    used = [found.candidates[way] for way in own]
    plan = replace(plan, stages=tuple(replace(stage, way=own.index(stage.way)) for stage in plan.stages))

    def decided(plan: HybridPlan) -> Planned:
        return Planned(
            as_plan(known.graph, made, plan, where.labels, order(plan)),
            plan,
            tuple(one.way for one in used),
            *about,
            _work(known),
            found.answer.certificate,
            shardings_of(made, plan, used, request.batch / plan.micro_batches),
            found.tried if max(degrees) > 1 else (),
        )

    fastest = decided(plan)
    moved = plan if schedule in LOOPED else cheaper_cuts(fastest)
    return (fastest if moved is plan else _proven(decided(moved))), found.asked


def _proven(found: Planned) -> Planned:
    """The plan with the gap to the bound that holds for its own time."""
    proof = found.certificate
    if proof is None or not found.seconds:
        return found
    bound = min(proof.bound, found.seconds)
    return replace(found, certificate=replace(proof, bound=bound, gap=1 - bound / found.seconds))


def _on_kinds(known: ModelProfile, others: Mapping[str, ModelProfile | Chain], cluster: Cluster, made: Layers) -> Chain:
    """The chain of a profile, with the times of each kind of device."""

    def chain(one: ModelProfile) -> Chain:
        return costed(known.graph, one, made)

    if others:
        found = {kind: chain(one) for kind, one in others.items() if isinstance(one, ModelProfile)}
        return beside(chain(known), {kind: scaled(one, known.batch) for kind, one in found.items()})
    if known.estimated_for is None:
        return _measured_on_kinds(known, cluster, made)
    kinds = other_kinds(cluster, known.estimated_for)
    own = {kind: replace(known, estimated_for=device).at(known.batch) for kind, device in kinds.items()}
    return beside(chain(known), {kind: chain(one) for kind, one in own.items()})


def _measured_on_kinds(known: ModelProfile, cluster: Cluster, made: Layers) -> Chain:
    """The chain of a measured profile: of its ops are known what they do, and so how much longer each takes on another
    kind of device. A profile of a device that the cluster lacks is taken to be of the first one."""
    found = on_kinds(known.graph, known.sizes, known, cluster, cluster.labels[0], known.products)
    return costed(known.graph, found, made)


def _scaled(chain: Chain, cluster: Cluster) -> Chain:
    """The chain, which is for the first device, with times on other kinds. Nothing is known of what its layers do, so
    all of them are scaled by `Device.flops`."""
    known = cluster.devices[0]
    kinds = other_kinds(cluster, known)
    return beside(chain, {kind: slower(chain, known.flops / device.flops) for kind, device in kinds.items()})


def _searched(planner: str, request: Request, schedule: str | None, stages_per_device: int | None) -> Answer:
    with timed("planning"):
        answer = find_plan(planner, request, schedule, stages_per_device)
    if answer.unfinished:
        warn(
            f"DAPPLE's search did not end in {show_seconds(request.seconds)}, so this is the best plan that it found "
            "by then: give a larger time_limit, or planner='optimal'",
            UnfinishedSearchWarning,
        )
    return answer


def _sizes(known: ModelProfile, request: Request) -> list[ModelProfile]:
    """The profile at each micro-batch size that the request allows. Of a measured profile only the one it has, which is
    scaled later."""
    if known.estimated_for is None:
        return [known]
    rows = {-(-request.batch // m) for m in request.counts(SIZES)}
    return [known.at(count) for count in sorted(rows)]


def _by_kind(what: Any, cluster: Cluster) -> tuple[Any, dict[str, ModelProfile | Chain]]:
    """What to plan with, and where there is one for each kind of device, all of them by kind."""
    if not isinstance(what, Mapping):
        return what, {}
    found = dict(what)
    if not found:
        raise PlanError('nothing to plan: give a profile or a Chain for each kind of device, as in {"V100": ...}')
    first = next(iter(found.values()))
    for kind, one in found.items():
        if not isinstance(one, (ModelProfile, Chain)) or isinstance(one, Chain) != isinstance(first, Chain):
            raise PlanError(
                f"for {kind!r} there is a {type(one).__name__}: give what fxpipe.profile returned for each kind of "
                "device, or a Chain for each"
            )
        if _names(one) != _names(first):
            raise PlanError(f"what is given for {kind!r} is not of the model that the others are of, {first.model}")
    for label in cluster.labels:
        if not {label, label.rpartition(":")[0]} & found.keys():
            raise PlanError(f"no costs for {label}: they are given for {', '.join(found)}")
    return first, found


def _names(one: ModelProfile | Chain) -> list[str]:
    return [part.name for part in (one.layers if isinstance(one, Chain) else one.ops)]


def _work(known: ModelProfile) -> SampleWork:
    """What a sample of the model is: its floating-point operations, and its tokens if it is text."""
    flops: dict[str, float] = {}
    for one in model_products(known.graph, known.sizes, known.products).values():
        flops[one.dtype] = flops.get(one.dtype, 0.0) + (one.forward + one.backward) / known.batch
    looked_up = {name for op in known.graph.ops if op_name(op) == "embedding" for name in op.reads}
    words = [
        item.type.numel(known.sizes) // known.batch
        for item in known.graph.inputs
        if item.name in looked_up and isinstance(item.type, TensorType) and item.batch_dim is not None
    ]
    return SampleWork(tuple(sorted(flops.items())), max(words, default=0))


def _profiled(what: Any, cluster: Cluster, example_inputs: Any, dtype: str | None) -> ModelProfile | Chain:
    """The profile or chain to plan; a model is profiled first."""
    if isinstance(what, (ModelProfile, Chain)):
        if dtype is not None:
            raise PlanError(f"dtype={dtype!r} is for models; a {type(what).__name__} has the times of its own type")
        return what
    if isinstance(what, Profile):
        raise PlanError(
            "this profile does not know the model that it is of, nor where that may be cut: "
            "give what fxpipe.profile(model, ...) returned, or the model itself"
        )
    if not isinstance(what, nn.Module):
        raise PlanError(f"cannot plan a {type(what).__name__}: give a model, its fxpipe.profile, or a Chain")
    if example_inputs is None:
        raise PlanError("a model is planned for a kind of call: say which, as in example_inputs=(x,)")
    if not cluster.devices:
        raise PlanError("cannot plan: the cluster has no devices")
    args, kwargs = as_call(example_inputs)
    return profile(what, *args, device=cluster, dtype=dtype, **kwargs)


def _without_ops(hybrid: HybridPlan, cluster: Cluster, schedule: str) -> Plan:
    """The plan of a chain, whose ops are not known."""
    stages = []
    for stage in hybrid.stages:
        device, *others = (cluster.labels[position] for position in stage.devices)
        stages.append(StagePlan((), device, "always" if stage.recompute else "never", replicas=tuple(others)))
    return Plan(
        hybrid.model, tuple(stages), hybrid.micro_batches, schedule, optimizer_sharding=hybrid.optimizer_sharding
    )


def _sharded(one: Planned) -> Planned:
    """The plan with the least sharding with which it fits in memory; as it is, if with none."""
    most = most_sharding(one.plan.schedule, max(stage.tensor_parallel for stage in one.layers.stages))
    for kind in OPTIMIZER_SHARDINGS[: OPTIMIZER_SHARDINGS.index(most) + 1]:
        own: dict[str, Any] = {"optimizer_sharding": kind}
        if fits(made := replace(one, plan=replace(one.plan, **own), layers=replace(one.layers, **own))):
            return made
    return one


def _ordered(found: Planned, request: Request, schedule: str | None) -> Planned:
    """The plan with the requested schedule, or for "auto" with the fastest one that fits in memory. What is proven of
    plans for 1F1B does not hold in other orders, so the certificate has the bound that does."""
    if schedule in (None, *WARMUPS, *LOOPED):
        return found
    others = ("1f1b-late", *(SPLIT if found.layers.optimizer_sharding == "zero3" else ()))
    names = [name for name in STRAIGHT if name not in others] if schedule == AUTO else [str(schedule)]
    tried = [found, *(replace(found, plan=replace(found.plan, schedule=name)) for name in names)]
    if found.optimizer_sharding == "auto":
        tried = [one if fits(one) else _sharded(one) for one in tried]
    fitting = [one for one in (tried if schedule == AUTO else tried[1:]) if fits(one)]
    if not fitting:
        raise PlanError(
            f"{found.plan.model} does not fit in memory in the order of {schedule!r}: more micro-batches wait than in "
            "that of '1f1b'; allow recompute=True, or write schedule='auto'"
        )
    best = min(fitting, key=lambda one: one.seconds)
    if best.certificate is None or not best.seconds:
        return best
    return _proven(replace(best, certificate=replace(best.certificate, bound=work_bound(request))))
