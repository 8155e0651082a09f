"""Write a small trajectory with mini-swe-agent's own agent, on answers that are given.

    python tools/agent_files/mini_swe_trajectory.py tests/data/agents/mini_swe_agent

Needs mini-swe-agent 2 in the environment (2.4.6 made the file of the tests), and nothing of Chatmill.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.test_models import DeterministicToolcallModel, make_toolcall_output

END = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def answer(text: str, name: str, command: str) -> Any:
    """Return an answer that calls the shell."""
    function = {"name": "bash", "arguments": f'{{"command":"{command}"}}'}
    call = {"id": name, "type": "function", "function": function}
    return make_toolcall_output(text, [call], [{"command": command, "tool_call_id": name}])


def main(folder: Path) -> None:
    """Run the agent."""
    folder.mkdir(parents=True, exist_ok=True)
    outputs = [answer("I look.", "c1", "echo one"), answer("", "c2", "false"), answer("Done.", "c3", END)]
    model = DeterministicToolcallModel(outputs=outputs)
    agent = DefaultAgent(
        model,
        LocalEnvironment(),
        system_template="Use the shell.",
        instance_template="{{task}}",
        output_path=folder / "add.traj.json",
    )
    agent.run("List what there is.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
