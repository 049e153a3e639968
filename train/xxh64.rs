//! XXH64 (Collet 2012, seed 0): the checksum of shards. Quick enough to be taken of everything, and `xxhsum -H1` tells the same.

const P1: u64 = 0x9e37_79b1_85eb_ca87;
const P2: u64 = 0xc2b2_ae3d_27d4_eb4f;
const P3: u64 = 0x1656_67b1_9e37_79f9;
const P4: u64 = 0x85eb_ca77_c2b2_ae63;
const P5: u64 = 0x27d4_eb2f_1656_67c5;

/// The sum of bytes that arrive in pieces.
#[derive(Clone)]
pub(crate) struct Xxh64 {
    lanes: [u64; 4],
    held: [u8; 32],
    len: u64,
}

fn round(lane: u64, word: u64) -> u64 {
    lane.wrapping_add(word.wrapping_mul(P2)).rotate_left(31).wrapping_mul(P1)
}

fn words<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> + '_ {
    bytes.as_chunks::<N>().0.iter().copied()
}

impl Xxh64 {
    pub(crate) fn new() -> Xxh64 {
        Xxh64 { lanes: [P1.wrapping_add(P2), P2, 0, P1.wrapping_neg()], held: [0; 32], len: 0 }
    }

    fn block(&mut self, block: &[u8; 32]) {
        for (lane, word) in self.lanes.iter_mut().zip(words::<8>(block)) {
            *lane = round(*lane, u64::from_le_bytes(word));
        }
    }

    pub(crate) fn update(&mut self, mut bytes: &[u8]) {
        let held = (self.len % 32) as usize;
        self.len += bytes.len() as u64;
        if held > 0 {
            let n = bytes.len().min(32 - held);
            self.held[held..held + n].copy_from_slice(&bytes[..n]);
            bytes = &bytes[n..];
            if held + n < 32 {
                return;
            }
            let block = self.held;
            self.block(&block);
        }
        let (blocks, rest) = bytes.as_chunks::<32>();
        for block in blocks {
            self.block(block);
        }
        self.held[..rest.len()].copy_from_slice(rest);
    }

    pub(crate) fn sum(&self) -> u64 {
        let mut sum = if self.len < 32 {
            P5
        } else {
            let turned = self.lanes.iter().zip([1, 7, 12, 18]);
            let sum = turned.map(|(lane, by)| lane.rotate_left(by)).fold(0, u64::wrapping_add);
            self.lanes.iter().fold(sum, |sum, &lane| (sum ^ round(0, lane)).wrapping_mul(P1).wrapping_add(P4))
        };
        sum = sum.wrapping_add(self.len);
        let rest = &self.held[..(self.len % 32) as usize];
        for word in words::<8>(rest) {
            sum = (sum ^ round(0, u64::from_le_bytes(word))).rotate_left(27).wrapping_mul(P1).wrapping_add(P4);
        }
        let mut rest = &rest[rest.len() / 8 * 8..];
        if let Some((word, after)) = rest.split_first_chunk() {
            let word = u64::from(u32::from_le_bytes(*word));
            sum = (sum ^ word.wrapping_mul(P1)).rotate_left(23).wrapping_mul(P2).wrapping_add(P3);
            rest = after;
        }
        for &byte in rest {
            sum = (sum ^ u64::from(byte).wrapping_mul(P5)).rotate_left(11).wrapping_mul(P1);
        }
        sum = (sum ^ (sum >> 33)).wrapping_mul(P2);
        sum = (sum ^ (sum >> 29)).wrapping_mul(P3);
        sum ^ (sum >> 32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(bytes: &[u8]) -> u64 {
        let mut state = Xxh64::new();
        state.update(bytes);
        state.sum()
    }

    #[test]
    fn published_values() {
        assert_eq!(sum(b""), 0xef46_db37_51d8_e999);
        assert_eq!(sum(b"a"), 0xd24e_c4f1_a98c_6e5b);
        assert_eq!(sum(b"abc"), 0x44bc_2cf5_ad77_0999);
        assert_eq!(sum(b"Nobody inspects the spammish repetition"), 0xfbce_a83c_8a37_8bf1);
    }

    #[test]
    fn pieces_do_not_matter() {
        let bytes: Vec<u8> = (0..200u32).map(|i| (i * 37) as u8).collect();
        for cut in 0..bytes.len() {
            for second in [cut, (cut + 5).min(200), (cut + 64).min(200)] {
                let mut state = Xxh64::new();
                [&bytes[..cut], &bytes[cut..second], &bytes[second..]]
                    .into_iter()
                    .for_each(|piece| state.update(piece));
                assert_eq!(state.sum(), sum(&bytes), "{cut} {second}");
            }
        }
    }
}
