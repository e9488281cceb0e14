"""An environment of your own, registered in one line.

Train on it (from this folder, so that the class can be imported)::

    camp-plugin train --config agentfold_sdcc.yaml --set run_name=sums \
        --set camp_environment=own_environment.Sums

or run this file to play one episode by hand.
"""

import random
from dataclasses import dataclass

import camp_plugin
from harness_bridges.engine import Step
from rollout_adapters.environments.registry import Task


class SumSession:
    """Numbers are shown one a turn; the answer is their sum."""

    stop = ("</answer>", "</more>")

    def __init__(self, numbers):
        self.numbers, self.shown = numbers, 0
        rule = "Reply <more></more> for the next number, or <answer>SUM</answer>."
        self.opening = (("system", rule), ("user", "Add up all numbers."))

    def step(self, response):
        if "<answer>" in response:
            right = f"<answer>{sum(self.numbers)}</answer>" in response
            return Step(observation="", done=True, reward=float(right))
        self.shown += 1
        left = self.numbers[self.shown - 1 : self.shown]
        return Step(observation=f"Next: {left[0]}" if left else "No more numbers.", done=False)

    def close(self):
        pass


@camp_plugin.register_environment("sums")
class Sums:
    """Deterministic tasks; train and test numbers come from different seeds."""

    @dataclass(frozen=True)
    class Config:
        sums_length: int = 5

    def __init__(self, config):
        self.config = config

    def tasks(self, split):
        return [Task(task_id=f"sums/{split}/{i}", split=split) for i in range(100)]

    def start(self, task):
        rng = random.Random(task.task_id)
        return SumSession([rng.randrange(100) for _ in range(self.config.sums_length)])


if __name__ == "__main__":
    environment = Sums(Sums.Config())
    session = environment.start(environment.tasks("train")[0])
    print(*session.opening, sep="\n")
    for _ in range(6):
        print(session.step("<more></more>").observation)
    print(session.step(f"<answer>{sum(session.numbers)}</answer>"))
