//! The offers of an init: the names of NCCL communicators that a rank has cached. They follow the request socket in each rank's
//! attachment. All ranks read the same negotiated config, so all find the same common offer.

use windlass_bootstrap::negotiated::{NegotiatedConfig, Token};

/// How many communicators a rank offers at most.
const OFFERS_MAX: usize = 32;
const TOKEN_BYTES: usize = size_of::<Token>();

/// Appends offers to an attachment, which holds the request socket already.
pub(in crate::peers) fn put(attachment: &mut Vec<u8>, cached: &[Token]) {
    cached.iter().take(OFFERS_MAX).for_each(|token| attachment.extend(token.0));
}

fn offers(attachment: &[u8]) -> impl Iterator<Item = Token> {
    let offered = attachment.get(TOKEN_BYTES..).unwrap_or_default();
    offered.as_chunks::<TOKEN_BYTES>().0.iter().take(OFFERS_MAX).map(|bytes| Token(*bytes))
}

/// The first offer of rank 0 that all ranks offer. None if the init is not lazy, or one rank caches nothing.
pub fn common(negotiated: &NegotiatedConfig) -> Option<Token> {
    if !negotiated.is_lazy() || !negotiated.caches() {
        return None;
    }
    let (first, others) = negotiated.members.split_first()?;
    offers(&first.attachment)
        .find(|token| others.iter().all(|member| offers(&member.attachment).any(|offered| offered == *token)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use windlass_bootstrap::negotiated::{Device, Member, Version, capability};

    fn negotiated(offered: &[&[u8]]) -> NegotiatedConfig {
        let member = |(rank, offered): (u32, &&[u8])| {
            let mut attachment = vec![rank as u8; 16];
            put(&mut attachment, &offered.iter().map(|byte| Token([*byte; 16])).collect::<Vec<_>>());
            Member {
                rank,
                process: Token([rank as u8; 16]),
                process_id: rank,
                device: Device {
                    uuid: [rank as u8; 16],
                    pci: (0, rank as u8, 0),
                    capability: 90,
                    multiprocessors: 132,
                },
                descriptor_socket: Token([0; 16]),
                process_listener: Token([0; 16]),
                cells: Vec::new(),
                attachment,
            }
        };
        NegotiatedConfig {
            comm: Token([9; 16]),
            version: Version::THIS,
            host: Token([8; 16]),
            capabilities: capability::LAZY | capability::CACHES,
            options: 0,
            ctas_max: 0,
            members: (0..).zip(offered).map(member).collect(),
        }
    }

    /// Rank 0's order decides among what all have. The request socket is no offer. One rank without offers, or that caches nothing,
    /// leaves no common one.
    #[test]
    fn first_in_common() {
        let named = |byte: u8| Some(Token([byte; 16]));
        assert_eq!(common(&negotiated(&[&[3, 5, 7], &[7, 5]])), named(5));
        assert_eq!(common(&negotiated(&[&[7, 5], &[3, 5, 7]])), named(7));
        assert_eq!(common(&negotiated(&[&[7, 5], &[5, 7], &[2, 5]])), named(5));
        assert_eq!(common(&negotiated(&[&[1], &[1], &[]])), None);
        assert_eq!(common(&negotiated(&[&[], &[4]])), None);
        assert_eq!(common(&negotiated(&[&[1], &[2]])), None);
        let kept = negotiated(&[&[5], &[5]]);
        for capabilities in [0, capability::LAZY, capability::CACHES] {
            assert_eq!(common(&NegotiatedConfig { capabilities, ..kept.clone() }), None);
        }
    }

    /// Offers beyond the limit, and offers cut short, do not count.
    #[test]
    fn bounded() {
        let many: Vec<u8> = (0..40).collect();
        assert_eq!(common(&negotiated(&[&many, &[35]])), None);
        assert_eq!(common(&negotiated(&[&many, &[31]])), Some(Token([31; 16])));
        let mut cut = negotiated(&[&[6], &[6]]);
        cut.members[1].attachment.pop();
        assert_eq!(common(&cut), None);
        cut.members[1].attachment.clear();
        assert_eq!(common(&cut), None);
    }
}
