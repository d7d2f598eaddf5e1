"""Corrections for tokens that older weights sampled, by the names that `actor.policy_loss` gives them."""

from __future__ import annotations

from toolwise.config.correction import CorrectionName
from toolwise.config.schema import ActorConfig
from toolwise.learner.correction import Correction
from toolwise.learner.corrections.cispo import Cispo
from toolwise.learner.corrections.decoupled_ppo import DecoupledPpo
from toolwise.learner.corrections.dppo_mask import DppoMask
from toolwise.learner.corrections.gspo import Gspo
from toolwise.learner.corrections.icepop import IcePop
from toolwise.learner.corrections.interpolated_ppo import InterpolatedPpo
from toolwise.learner.corrections.no_correction import NoCorrection
from toolwise.learner.corrections.sequence_mask import SequenceMask
from toolwise.learner.corrections.token_tis import TokenTis
from toolwise.learner.losses import PpoClip
from toolwise.protocols import PolicyLoss


def build_loss(actor: ActorConfig, name: str) -> PolicyLoss:
    """The built-in policy loss of this name: a correction, or PPO's."""
    ppo = PpoClip(actor.clip_ratio_low, actor.clip_ratio_high, actor.dual_clip or None)
    options = actor.correction
    corrections: dict[CorrectionName, Correction] = {
        "none": NoCorrection(ppo),
        "tis": TokenTis(ppo, actor.importance_cap),
        "decoupled": DecoupledPpo(ppo, options.decoupled_cap or None),
        "interpolated": InterpolatedPpo(ppo, options.decoupled_cap or None),
        "icepop": IcePop(ppo, options.icepop_low, options.icepop_high),
        "sequence_mask": SequenceMask(ppo, options.sequence_low, options.sequence_high),
        "dppo": DppoMask(options.dppo_threshold),
        "cispo": Cispo(options.cispo_high),
        "gspo": Gspo(options.gspo_low, options.gspo_high),
    }
    return {str(key): loss for key, loss in corrections.items()}.get(name, ppo)
