"""The course's exercises: checks that compare a student's answer with the reference, and name the likely mistake."""

from .declare import EXERCISES, Exercise
from .session import Answered, Check

__all__ = ["EXERCISES", "Answered", "Check", "Exercise"]
