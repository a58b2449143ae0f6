"""What a contract says when it refuses a description."""


class ContractError(ValueError):
    """A contract, or a part of one, contradicts itself; the message names the culprit and the remedy."""
