"""A few runs of the state machine of `engine_machine.py`; tests/campaigns has many."""

from engine_machine import EngineMachine
from hypothesis import Phase, settings

TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=3, stateful_step_count=25, phases=[Phase.generate])
