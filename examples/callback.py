"""Train the testbed's model with two callbacks: one ends the run, one draws a histogram.

    python examples/callback.py

It takes a minute on a laptop. docs/how-to/callbacks.md says more.
"""

import sage_fast as sf

OUTPUT = "runs/callback"
ITERATIONS = 10


class StopWhenFalling(sf.Callback):
    """Ends a run once a part of its reward is far below its best value.

    Args:
        part: of the reward, as in `metrics.jsonl`.
        most: how far it may fall.
    """

    def __init__(self, part, most=0.1):
        self.part = part
        self.most = most
        self.best = float("-inf")

    def on_iteration_end(self, run, row):
        value = row[f"reward_part/{self.part}"]
        self.best = max(self.best, value)
        if value < self.best - self.most:
            run.stop(f"{self.part} has fallen from {self.best:.3f} to {value:.3f}")

    # a resume goes on from the best value so far

    def state_dict(self):
        return {"best": self.best}

    def load_state_dict(self, state):
        self.best = state["best"]


class Advantages(sf.Callback):
    """Draws a histogram of the advantages: in the trackers, and as numbers in `metrics.jsonl`."""

    def on_rollout_end(self, run, rollouts):
        self.advantages = rollouts.advantages

    def on_iteration_end(self, run, row):
        row["advantages"] = sf.Histogram(self.advantages)


def main(output=OUTPUT, iterations=ITERATIONS, most=0.3):
    """Train, and return the run."""
    config = sf.build(
        {
            "output": output,
            "model.dtype": "float32",
            "sampling": {"steps": 4, "num_frames": 17, "height": 32, "width": 32},
            "train": {"iterations": iterations, "batch_size": 8, "learning_rate": 3e-4},
            "objective.clip_range": 1e-3,
            "eval": {"steps": 4, "num_prompts": 2, "seeds_per_prompt": 1, "num_videos": 1},
        }
    )
    return sf.train(config, callbacks=[StopWhenFalling("vq", most), Advantages()])


if __name__ == "__main__":
    sf.log_to_screen()
    run = main()
    print(f"{run.iteration} iterations: {run.folder}/report.html")
