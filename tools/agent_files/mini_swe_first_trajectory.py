"""Write a small trajectory with the agent and the writer of an early mini-swe-agent, on answers that are given.

    python tools/agent_files/mini_swe_first_trajectory.py tests/data/agents/mini_swe_agent-1.1.0

Needs mini-swe-agent 1.1.0 in the environment, and nothing of Chatmill.
"""

from __future__ import annotations

import sys
from pathlib import Path

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.test_models import DeterministicModel
from minisweagent.run.utils.save import save_traj

END = "echo MINI_SWE_AGENT_FINAL_OUTPUT"


def main(folder: Path) -> None:
    """Run the agent."""
    folder.mkdir(parents=True, exist_ok=True)
    commands = ("echo one", "false", END)
    outputs = [f"I look.\n\n```bash\n{command}\n```" for command in commands]
    model = DeterministicModel(outputs=outputs)
    agent = DefaultAgent(model, LocalEnvironment(), system_template="Use the shell.")
    status, result = agent.run("List what there is.")[:2]
    save_traj(agent, folder / "add.traj.json", exit_status=status, result=result)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
