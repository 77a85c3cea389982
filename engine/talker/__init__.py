"""The vLLM side: talker, code predictor, in-model sampling, request slots, step loop."""

from engine.talker.settings import TalkerSettings
from engine.talker.slots import PromptRows, SlotOptions, SlotsFull
from engine.talker.talker import Talker, TalkerFrames

__all__ = ["PromptRows", "SlotOptions", "SlotsFull", "Talker", "TalkerFrames", "TalkerSettings"]
