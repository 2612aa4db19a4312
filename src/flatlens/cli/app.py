"""The cyclopts app: every command, with the examples of its help."""

from __future__ import annotations

from importlib.metadata import version

from cyclopts import App

from flatlens.cli import compare, data, demo, measure, report, reproduce, sweep, train, zoo

app = App(
    name="flatlens",
    help="How flat is the loss, how compressed is the representation, "
    "and what does one force on the other?",
    version=lambda: version("flatlens"),
    help_format="plaintext",
    help_epilogue="""Examples:
  flatlens demo
  flatlens measure mymodel:build --checkpoint weights.pt --data digits
  flatlens compare runs/sgd runs/sam
  flatlens train --model mlp --data fashion-mnist --lr 0.1
  flatlens sweep --model mlp --data fashion-mnist --lr 0.05 0.1 0.2 --seeds 5 --out runs/mlp
  flatlens report runs/mlp

Exit codes: 0 done, 1 some work failed, 2 bad input, 3 runs left to another process, 130 Ctrl-C.""",
    suppress_keyboard_interrupt=False,  # guard.py turns Ctrl-C into its exit code
    result_action="return_value",
)
app.command(demo.demo, help_epilogue=demo.EXAMPLES)
app.command(measure.measure, help_epilogue=measure.EXAMPLES)
app.command(compare.compare, help_epilogue=compare.EXAMPLES)
app.command(train.train, help_epilogue=train.EXAMPLES)
app.command(sweep.sweep, help_epilogue=sweep.EXAMPLES)
app.command(reproduce.reproduce, help_epilogue=reproduce.EXAMPLES)
app.command(zoo.zoo, help_epilogue=zoo.EXAMPLES)
app.command(report.report, help_epilogue=report.EXAMPLES)
app.command(data.app)
app.register_install_completion_command(help="Install completion for the current shell.")
