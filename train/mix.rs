//! Integer hashing with a meaning that never changes: orders and splits of data depend on it.

/// SplitMix64's finaliser (Steele, Lea, Flood 2014): every output bit depends on every input bit.
pub(crate) fn mix(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// FNV-1a over bytes, finished by [`mix`] since FNV's low bits alone are weak.
pub(crate) fn hash(bytes: &[u8]) -> u64 {
    let fnv = bytes.iter().fold(0xcbf2_9ce4_8422_2325u64, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
    mix(fnv)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_pinned() {
        // First output of SplitMix64 from state 0, as published.
        assert_eq!(mix(0), 0xe220_a839_7b1d_cdaf);
        assert_ne!(hash(b"ab"), hash(b"ba"));
    }
}
