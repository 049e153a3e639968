//! Span corruption: what an encoder-decoder learns from. Spans of a text are hidden behind sentinels in the source; the target
//! has every sentinel with its span, and one more sentinel at the end. Drawn anew for every row of a run, a pure function of
//! its seed and the row's number; how many and how long together follows from the length, see [`SpanCounts`].

use kumiki_models::{EncoderDecoderConfig, SpanCounts};
use kumiki_tensor::Rng;

/// Source and target of the text of row `row`.
pub fn corrupt(config: &EncoderDecoderConfig, text: &[i64], seed: u64, row: u64) -> (Vec<i64>, Vec<i64>) {
    let counts = SpanCounts::of(text.len());
    let mut rng = Rng::new(seed).fork("spans").fork(&row.to_string());
    let hidden = parts(counts.hidden, counts.spans, &mut rng);
    // What follows the last span may be nothing: one token too many is dealt out.
    let kept = parts(text.len() - counts.hidden + 1, counts.spans + 1, &mut rng);
    let (mut source, mut target) = (Vec::with_capacity(counts.source()), Vec::with_capacity(counts.target()));
    let mut at = 0;
    for (n, (hidden, kept)) in hidden.iter().zip(&kept).enumerate() {
        let sentinel = config.sentinel(n);
        source.extend_from_slice(&text[at..at + kept]);
        source.push(sentinel);
        target.push(sentinel);
        target.extend_from_slice(&text[at + kept..at + kept + hidden]);
        at += kept + hidden;
    }
    source.extend_from_slice(&text[at..]);
    target.push(config.sentinel(counts.spans));
    (source, target)
}

/// `count` numbers from 1 that add up to `sum`, every way to do so as likely.
fn parts(sum: usize, count: usize, rng: &mut Rng) -> Vec<usize> {
    // Where they end: `count - 1` different places among `sum - 1`, found by one pass over them.
    let (mut ends, mut wanted) = (Vec::with_capacity(count), count - 1);
    for place in 1..sum {
        if rng.below((sum - place) as u64) < wanted as u64 {
            ends.push(place);
            wanted -= 1;
        }
    }
    ends.push(sum);
    let mut from = 0;
    ends.into_iter().map(|end| end - std::mem::replace(&mut from, end)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: usize) -> EncoderDecoderConfig {
        let sentinels = SpanCounts::of(text).sentinels();
        EncoderDecoderConfig {
            n_vocab: 256 + sentinels,
            sentinels,
            d_model: 8,
            heads: 2,
            d_ff: 8,
            encoder_layers: 1,
            decoder_layers: 1,
            rope_base: 1e4,
        }
    }

    /// What source and target say together.
    fn restored(config: &EncoderDecoderConfig, source: &[i64], target: &[i64]) -> Vec<i64> {
        let first = config.sentinel(0);
        let span = |sentinel: i64| {
            let at = target.iter().position(|&id| id == sentinel).expect("in the target") + 1;
            target[at..].iter().copied().take_while(move |&id| id < first)
        };
        source.iter().flat_map(|&id| if id < first { vec![id] } else { span(id).collect() }).collect()
    }

    #[test]
    fn nothing_is_lost_and_lengths_follow_from_the_length() {
        for len in [2, 3, 4, 7, 10, 64, 256, 1000] {
            let (config, counts) = (config(len), SpanCounts::of(len));
            let text: Vec<i64> = (0..len as i64).map(|i| i % 256).collect();
            for row in 0..50 {
                let (source, target) = corrupt(&config, &text, 3, row);
                assert_eq!((source.len(), target.len()), (counts.source(), counts.target()), "{len}");
                assert_eq!(restored(&config, &source, &target), text, "{len} {row}");
                let sentinels: Vec<i64> = target.iter().copied().filter(|&id| id >= 256).collect();
                assert_eq!(sentinels, (256..256 + config.sentinels as i64).collect::<Vec<_>>());
                assert!(source[0] < 256, "the first token is seen");
                assert!(source.windows(2).all(|pair| pair[0] < 256 || pair[1] < 256), "spans touch");
            }
        }
        let counts = SpanCounts::of(256);
        assert_eq!((counts.hidden, counts.spans), (38, 10));
    }

    #[test]
    fn draws_depend_on_seed_and_row_and_reach_every_place() {
        let (config, text) = (config(40), (0..40).collect::<Vec<i64>>());
        let draw = |seed, row| corrupt(&config, &text, seed, row);
        assert_eq!(draw(1, 2), draw(1, 2));
        assert!(draw(1, 2) != draw(1, 3) && draw(1, 2) != draw(2, 2));
        let mut hidden = [0; 40];
        for row in 0..2000 {
            draw(0, row).1.iter().filter(|&&id| id < 256).for_each(|&id| hidden[id as usize] += 1);
        }
        assert!(hidden[0] == 0 && hidden[1..].iter().all(|&n| n > 100), "{hidden:?}");
    }
}
