//! "Did you mean …": the nearest right name to a misspelt one.
//!
//! Distance is Damerau–Levenshtein in its restricted form (insert, delete, replace, swap of two neighbours cost 1 each),
//! ignoring case and taking `_` and `-` as the same letter. O(len²) on names of a few letters.

/// The candidate nearest to `name`, if it is near enough to be a slip of the hand: at most a third of the longer
/// name's letters differ (at least one may), or one name starts with the other. Ties go to the first candidate.
///
/// ```
/// use kumiki_train::suggest::nearest;
/// assert_eq!(nearest("tangoo", &["tango", "wango"]), Some("tango"));
/// assert_eq!(nearest("flash", &["tango", "wango"]), None);
/// ```
pub fn nearest<'a>(name: &str, candidates: &[&'a str]) -> Option<&'a str> {
    let folded = fold(name);
    let mut best: Option<(usize, &'a str)> = None;
    for &candidate in candidates {
        let other = fold(candidate);
        let d = distance(&folded, &other);
        let allowed = (folded.len().max(other.len()) / 3).max(1);
        let prefix =
            folded.len() >= 3 && other.len() >= 3 && (folded.starts_with(&other) || other.starts_with(&folded));
        if (d <= allowed && d < other.len() || prefix) && best.is_none_or(|(b, _)| d < b) {
            best = Some((d, candidate));
        }
    }
    best.map(|(_, c)| c)
}

/// `unknown <kind> `name`; did you mean `x`? Known: a, b, c`: the sentence for every list of names in the system.
pub fn unknown(kind: &str, name: &str, known: &[&str]) -> String {
    let hint = nearest(name, known).map(|n| format!("; did you mean `{n}`?")).unwrap_or_else(|| ".".into());
    format!("unknown {kind} `{name}`{hint} Known: {}", known.join(", "))
}

fn fold(name: &str) -> Vec<char> {
    name.chars().flat_map(char::to_lowercase).map(|c| if c == '_' { '-' } else { c }).collect()
}

fn distance(a: &[char], b: &[char]) -> usize {
    // Three rows of the classic table: the swap looks back two.
    let mut before: Vec<usize> = vec![0; b.len() + 1];
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i; b.len() + 1];
        for j in 1..=b.len() {
            let differ = usize::from(a[i - 1] != b[j - 1]);
            row[j] = (last[j - 1] + differ).min(last[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                row[j] = row[j].min(before[j - 2] + 1);
            }
        }
        before = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn case_42_nearest_right_name() {
        let keys = ["learning_rate", "batch_size", "seed", "steps", "val_fraction"];
        assert_eq!(nearest("lerning_rate", &keys), Some("learning_rate"));
        assert_eq!(nearest("batch-size", &keys), Some("batch_size"));
        assert_eq!(nearest("sede", &keys), Some("seed"));
        assert_eq!(nearest("STEP", &keys), Some("steps"));
        assert_eq!(nearest("val", &keys), Some("val_fraction"));
        assert_eq!(nearest("optimizer", &keys), None);
        assert_eq!(nearest("", &["a", "b"]), None);
        assert_eq!(nearest("x", &["a", "b"]), None);
        assert_eq!(nearest("anything", &[]), None);
    }

    #[test]
    fn the_nearer_of_two_wins_and_ties_go_to_the_first() {
        assert_eq!(nearest("wango", &["tango", "wango"]), Some("wango"));
        assert_eq!(nearest("bango", &["tango", "wango"]), Some("tango"));
        assert_eq!(distance(&fold("ca"), &fold("abc")), 3);
        assert_eq!(distance(&fold("ab"), &fold("ba")), 1);
        assert_eq!(distance(&fold("kitten"), &fold("sitting")), 3);
    }

    #[test]
    fn sentence() {
        let text = unknown("model", "tangoo", &["tango", "recurrent"]);
        assert_eq!(text, "unknown model `tangoo`; did you mean `tango`? Known: tango, recurrent");
        assert_eq!(unknown("model", "zzz", &["tango"]), "unknown model `zzz`. Known: tango");
    }
}
