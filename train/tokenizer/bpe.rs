//! Byte-level byte-pair encoding, as GPT-2 has it: a text is cut into words ([`super::pretokenize`]), a word begins as its
//! bytes, and of all neighbours the pair that was learned first is merged, until none is left that was learned.
//!
//! Every byte is a token, so any bytes can be encoded and come back exactly; those that are not UTF-8 stay single. A word's
//! tokens depend on the word alone: an [`Cache`] of the words seen last does most of the work. Special tokens are never found
//! in a text: `<|endoftext|>` in it is ordinary text.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

use super::pretokenize::words;
use crate::mix::{hash, mix};
use crate::{Error, Result};

/// A pair of tokens as one number.
type Pair = u64;

fn pair(left: u32, right: u32) -> Pair {
    u64::from(left) << 32 | u64::from(right)
}

/// Hashes the one number that a [`Pair`] is.
#[derive(Default)]
struct PairHasher(u64);

impl Hasher for PairHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0 = mix(self.0 ^ hash(bytes));
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = mix(number);
    }
}

/// When a pair was learned, and what it becomes.
#[derive(Clone, Copy)]
struct Merge {
    rank: u32,
    id: u32,
}

/// A token that is not made from text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Special {
    pub id: u32,
    pub text: String,
}

/// A vocabulary with what was learned.
pub(crate) struct Bpe {
    /// Bytes of every token; none where an id is not in use, and of special tokens.
    tokens: Vec<Option<Box<[u8]>>>,
    bytes: [u32; 256],
    merges: HashMap<Pair, Merge, BuildHasherDefault<PairHasher>>,
    specials: Vec<Special>,
}

/// Words of at most this many bytes are kept in a cache.
const SHORT: usize = 16;
/// Tokens of a word that is kept, at most.
const FEW: usize = 5;
/// Slots of a cache: 5 MB.
const SLOTS: usize = 1 << 17;
/// Up to here looking at all pairs for the first is quicker than keeping them in order.
const SCANNED: usize = 48;

#[derive(Clone, Copy, Default)]
struct Slot {
    word: u128,
    ids: [u32; FEW],
    len: u8,
    count: u8,
}

/// Words seen last and their tokens, each in the one slot that its hash gives.
pub(crate) struct Cache {
    slots: Box<[Slot]>,
    merging: Merging,
}

impl Default for Cache {
    fn default() -> Cache {
        Cache { slots: vec![Slot::default(); SLOTS].into(), merging: Merging::default() }
    }
}

/// Room for the merging of one word.
#[derive(Default)]
struct Merging {
    parts: Vec<u32>,
    ranks: Vec<Option<Merge>>,
}

impl Bpe {
    /// Of tokens by id, pairs in the order in which they were learned, and special tokens.
    ///
    /// # Errors
    /// When a byte has no token, or a pair's result is none.
    pub(crate) fn new(
        tokens: Vec<Option<Box<[u8]>>>,
        learned: impl IntoIterator<Item = (u32, u32)>,
        specials: Vec<Special>,
    ) -> Result<Bpe> {
        let mut ids: HashMap<&[u8], u32> = HashMap::new();
        for (id, token) in tokens.iter().enumerate() {
            if let Some(token) = token {
                ids.insert(token, id as u32);
            }
        }
        let mut bytes = [0; 256];
        for (byte, id) in bytes.iter_mut().enumerate() {
            let found = ids.get(&[byte as u8][..]);
            *id = *found.ok_or_else(|| Error::new(format!("its vocabulary has no token for the byte {byte:#04x}")))?;
        }
        let mut merges: HashMap<Pair, Merge, _> = HashMap::default();
        for (rank, (left, right)) in learned.into_iter().enumerate() {
            let part = |id: u32| tokens.get(id as usize).and_then(Option::as_deref);
            let joined = part(left).zip(part(right)).map(|(l, r)| [l, r].concat());
            let id = joined.as_deref().and_then(|joined| ids.get(joined)).copied();
            let id = id.ok_or_else(|| Error::new(format!("what its merge {rank} gives is no token")))?;
            merges.entry(pair(left, right)).or_insert(Merge { rank: rank as u32, id });
        }
        Ok(Bpe { bytes, merges, specials, tokens })
    }

    /// GPT-2's vocabulary, from the list of tokens in the order in which they were learned.
    ///
    /// # Errors
    /// As [`Bpe::new`].
    pub(crate) fn of_ranked(tokens: Vec<Box<[u8]>>, specials: Vec<Special>) -> Result<Bpe> {
        let all: Vec<Option<Box<[u8]>>> = tokens.into_iter().map(Some).collect();
        let mut bpe = Bpe::new(all, [], specials)?;
        let mut room = Merging::default();
        for id in 0..bpe.tokens.len() as u32 {
            let Some(token) = bpe.tokens[id as usize].clone() else { continue };
            if token.len() < 2 {
                continue;
            }
            // What was learned before makes two parts of it: those were merged then.
            bpe.merge(&token, &mut room);
            let [left, right] = room.parts[..] else {
                return Err(Error::new(format!("token {id} is no pair of tokens before it")));
            };
            bpe.merges.insert(pair(left, right), Merge { rank: id, id });
        }
        Ok(bpe)
    }

    /// Ids, those not in use included.
    pub(crate) fn vocab(&self) -> usize {
        let special = self.specials.iter().map(|special| special.id as usize + 1).max().unwrap_or(0);
        self.tokens.len().max(special)
    }

    pub(crate) fn specials(&self) -> &[Special] {
        &self.specials
    }

    /// The bytes of a token: of a special one those of its name.
    pub(crate) fn token(&self, id: u32) -> Option<&[u8]> {
        let special = || self.specials.iter().find(|special| special.id == id).map(|s| s.text.as_bytes());
        self.tokens.get(id as usize).and_then(Option::as_deref).or_else(special)
    }

    /// Pairs in the order in which they were learned.
    pub(crate) fn learned(&self) -> Vec<(u32, u32)> {
        let mut all: Vec<(u32, Pair)> = self.merges.iter().map(|(&pair, merge)| (merge.rank, pair)).collect();
        all.sort_unstable();
        all.into_iter().map(|(_, pair)| ((pair >> 32) as u32, pair as u32)).collect()
    }

    /// Appends the tokens of `bytes`.
    pub(crate) fn encode(&self, bytes: &[u8], cache: &mut Cache, out: &mut Vec<u32>) {
        for chunk in bytes.utf8_chunks() {
            for word in words(chunk.valid()) {
                self.word(word.as_bytes(), cache, out);
            }
            out.extend(chunk.invalid().iter().map(|&byte| self.bytes[byte as usize]));
        }
    }

    fn word(&self, word: &[u8], cache: &mut Cache, out: &mut Vec<u32>) {
        let Cache { slots, merging } = cache;
        if word.len() > SHORT {
            self.merge(word, merging);
            out.extend_from_slice(&merging.parts);
            return;
        }
        let mut padded = [0; SHORT];
        padded[..word.len()].copy_from_slice(word);
        let key = u128::from_le_bytes(padded);
        let folded = (key as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ ((key >> 64) as u64).rotate_left(17);
        let slot = &mut slots[(folded.wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 47) as usize];
        if slot.word == key && usize::from(slot.len) == word.len() {
            out.extend_from_slice(&slot.ids[..usize::from(slot.count)]);
            return;
        }
        self.merge(word, merging);
        out.extend_from_slice(&merging.parts);
        if merging.parts.len() <= FEW {
            *slot = Slot { word: key, len: word.len() as u8, count: merging.parts.len() as u8, ids: [0; FEW] };
            slot.ids[..merging.parts.len()].copy_from_slice(&merging.parts);
        }
    }

    fn found(&self, left: u32, right: u32) -> Option<Merge> {
        self.merges.get(&pair(left, right)).copied()
    }

    /// The tokens of a word, left in `room.parts`.
    fn merge(&self, word: &[u8], room: &mut Merging) {
        if word.len() > SCANNED {
            return self.merge_long(word, room);
        }
        let Merging { parts, ranks } = room;
        parts.clear();
        parts.extend(word.iter().map(|&byte| self.bytes[byte as usize]));
        ranks.clear();
        ranks.extend(parts.windows(2).map(|two| self.found(two[0], two[1])));
        loop {
            let known = ranks.iter().enumerate().filter_map(|(at, merge)| merge.map(|m| (m.rank, at, m.id)));
            // Of equal pairs the leftmost.
            let Some((_, at, id)) = known.min() else { return };
            parts[at] = id;
            parts.remove(at + 1);
            ranks.remove(at);
            if at > 0 {
                ranks[at - 1] = self.found(parts[at - 1], id);
            }
            if at < ranks.len() {
                ranks[at] = self.found(id, parts[at + 1]);
            }
        }
    }

    /// The same for words of any length: pairs wait in order, and those that are gone when their turn comes are passed over.
    fn merge_long(&self, word: &[u8], room: &mut Merging) {
        const GONE: u32 = u32::MAX;
        let n = word.len();
        let mut ids: Vec<u32> = word.iter().map(|&byte| self.bytes[byte as usize]).collect();
        let mut next: Vec<usize> = (1..=n).collect();
        let mut previous: Vec<Option<usize>> = (0..n).map(|at| at.checked_sub(1)).collect();
        let mut waiting = BinaryHeap::new();
        let queue = |left: usize, right: usize, ids: &[u32], waiting: &mut BinaryHeap<_>| {
            if let Some(merge) = self.found(ids[left], ids[right]) {
                waiting.push(Reverse((merge.rank, left, pair(ids[left], ids[right]), merge.id)));
            }
        };
        for left in 0..n.saturating_sub(1) {
            queue(left, left + 1, &ids, &mut waiting);
        }
        while let Some(Reverse((_, left, two, id))) = waiting.pop() {
            let right = next[left];
            if right >= n || ids[left] == GONE || pair(ids[left], ids[right]) != two {
                continue;
            }
            (ids[left], ids[right]) = (id, GONE);
            next[left] = next[right];
            if next[left] < n {
                previous[next[left]] = Some(left);
                queue(left, next[left], &ids, &mut waiting);
            }
            if let Some(before) = previous[left] {
                queue(before, left, &ids, &mut waiting);
            }
        }
        room.parts.clear();
        room.parts.extend(ids.into_iter().filter(|&id| id != GONE));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny() -> Bpe {
        let mut tokens: Vec<Box<[u8]>> = (0..=255u8).map(|b| [b].into()).collect();
        for token in ["ab", "abab", " a", "aa", "aaaa", "b a"] {
            tokens.push(token.as_bytes().into());
        }
        Bpe::of_ranked(tokens[..260 + 1].to_vec(), vec![Special { id: 261, text: "<end>".into() }]).unwrap()
    }

    fn encode(bpe: &Bpe, text: &[u8]) -> Vec<u32> {
        let mut out = Vec::new();
        bpe.encode(text, &mut Cache::default(), &mut out);
        let back: Vec<u8> = out.iter().flat_map(|&id| bpe.token(id).unwrap().to_vec()).collect();
        assert_eq!(back, text);
        out
    }

    #[test]
    fn pairs_are_merged_in_the_order_they_were_learned() {
        let bpe = tiny();
        assert_eq!(bpe.vocab(), 262);
        assert_eq!(encode(&bpe, b"ababab"), [257, 256]);
        assert_eq!(encode(&bpe, b"aaaaaaa"), [260, 259, 97]);
        assert_eq!(encode(&bpe, b"ab aab"), [256, 258, 256]);
        assert_eq!(encode(&bpe, b"<end>"), b"<end>".map(u32::from), "a special token's name is ordinary text");
        assert_eq!(bpe.learned().len(), 5);
        assert_eq!(bpe.learned()[1], (256, 256));
    }

    #[test]
    fn case_41_any_bytes_come_back() {
        let bpe = tiny();
        let all: Vec<u8> = (0..=255).chain(*b"ab\xf0\x9f\x92abab\xc3").collect();
        assert!(encode(&bpe, &all).ends_with(&[256, 0xf0, 0x9f, 0x92, 257, 0xc3]));
        assert_eq!(encode(&bpe, &[0x92]), [0x92]);
    }

    #[test]
    fn long_words_give_what_short_ones_would() {
        let bpe = tiny();
        let mut room = Merging::default();
        for n in 0..400u32 {
            let word: Vec<u8> =
                (0..20 + n % 200).map(|i| b"ab "[(mix(u64::from(n * 1000 + i)) % 5 / 2) as usize]).collect();
            bpe.merge_long(&word, &mut room);
            let long = room.parts.clone();
            // The scan, whatever the length.
            let mut ids: Vec<u32> = word.iter().map(|&b| u32::from(b)).collect();
            while let Some((_, at, id)) =
                (1..ids.len()).filter_map(|at| bpe.found(ids[at - 1], ids[at]).map(|m| (m.rank, at, m.id))).min()
            {
                ids.splice(at - 1..=at, [id]);
            }
            assert_eq!(long, ids, "{word:?}");
            bpe.merge(&word, &mut room);
            assert_eq!(room.parts, ids);
        }
        let started = std::time::Instant::now();
        assert_eq!(encode(&bpe, &[b'a'; 1_000_000]).len(), 250_000);
        assert!(started.elapsed().as_secs() < 20, "a word of 1 MB must not take a time that grows with its square");
    }
}
