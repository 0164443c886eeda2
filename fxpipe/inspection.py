"""What a pipe shows of itself: everything that was made for a kind of call is a value to look at."""

from __future__ import annotations

from collections.abc import Mapping

from .engines.local import Pipeline
from .errors import FxpipeError
from .ir.device_programs import DevicePrograms
from .ir.plan import Plan
from .ir.program import Program
from .ir.schedule import Schedule
from .ir.timeline import Timeline
from .ir.timeline import compare as beside
from .ir.transfers import add_transfers
from .report import explain
from .runtime import Stage
from .shell import Shell
from .street import Build, predict
from .viz import svg


class Inspected(Shell):
    """The part of `Pipe` that changes nothing."""

    @property
    def build(self) -> Build:
        """Everything made for the kind of call that was compiled or run last."""
        last: Build | None = self._last
        if last is None:
            raise FxpipeError("nothing is compiled yet: call the pipe once, or pass example_inputs to fxpipe.compile")
        return last

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages that run, as modules; `.source` is the text of the file each came from."""
        return self.scheduler.stages

    @property
    def scheduler(self) -> Pipeline:
        """The scheduler that runs; `.source` is the text of the file it came from."""
        found: Pipeline = self._live(self.build).scheduler
        return found

    @property
    def plan(self) -> Plan:
        """The decisions: which ops form which stage, and where it runs."""
        return self.build.plan

    @property
    def schedule(self) -> Schedule:
        """What each device does when. Prints as a grid."""
        return self.build.schedule

    @property
    def timeline(self) -> Timeline | None:
        """What each device did in the last `step(..., timeline=True)`, and when. Prints as a table; `fxpipe.viz` draws
        it as text (`text.bars`), as SVG (`svg.draw`) and writes a trace for Perfetto (`trace.trace`)."""
        found: Timeline | None = self._timeline
        return found

    @property
    def programs(self) -> DevicePrograms:
        """What each device runs, sends and receives, in order. Prints as a listing."""
        return add_transfers(self.build.schedule, self.build.program)

    @property
    def files(self) -> Mapping[str, str]:
        """The generated package: text by file name."""
        return self.build.files

    @property
    def trail(self) -> Mapping[str, Program]:
        """The program after each pass that changed it: `pipe.trail["portals"]`."""
        return self.build.trail

    def explain(self) -> str:
        """A table: per stage its ops, parameters, time, memory and traffic; then the portals and shared parameters.
        With a strategy, how each operator is cut, and the table by devices."""
        return explain(self.build, self._backend)

    def compare(self) -> str:
        """A table: what was predicted beside what was measured in the last step with `timeline=True`. Predicted is what
        the last `rehearse` did, if it was of the same kind, else what follows from the profile."""
        measured = self.timeline
        if measured is None:
            raise FxpipeError("no step was timed yet: call pipe.step(..., timeline=True) first")
        chunks = 1 + max(span.micro_batch for span in measured.spans)
        if self._rehearsed is not None:
            made, predicted = self._rehearsed
            if made is self._timed and chunks == 1 + max(span.micro_batch for span in predicted.spans):
                return beside(predicted, measured)
        return beside(predict(self._timed, chunks), measured)

    def picture(self) -> str:
        """The simulated timeline of one step as SVG text."""
        return svg.draw(self.build.timeline)
