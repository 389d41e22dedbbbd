from .anchor_file import AnchorFile as AnchorFile
from .journal_proof import JournalProof as JournalProof, prove as prove
from .signed_head import (
    HeadSigner as HeadSigner,
    HeadVerifier as HeadVerifier,
    SignedHead as SignedHead,
    make_keys as make_keys,
    parse_head as parse_head,
)
