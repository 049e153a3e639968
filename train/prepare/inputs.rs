//! What is to be prepared: paths and patterns as files with their formats.

use std::collections::HashSet;
use std::fs;
use std::path::{Component, Path, PathBuf};

use crate::kinds::{Kind, Unpacked};
use crate::mix::{hash, mix};
use crate::{Error, Result};

/// How a file is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Packing {
    Plain,
    Gzip,
    Zstd,
}

/// What a file is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// One document.
    Text,
    /// One document, in which proofs are told from other source.
    Lean,
    /// A question on one line, its answer on the next: a document.
    Questions,
    /// One JSON object on every line, its `text` a document.
    JsonLines,
    /// A table, its column `text` has the documents.
    Parquet,
}

/// One of the two parts that documents go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Train,
    Val,
}

/// To which part a file's documents go.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Share {
    /// All of them.
    All(Part),
    /// Each is drawn.
    Drawn,
    /// The one document is cut there: what stands before is trained on, the rest held out.
    CutAt(u64),
}

/// A file to read.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Input {
    pub path: PathBuf,
    /// What it is called within the folder that was named: the same wherever that lies.
    pub name: String,
    /// As it lies on the disk.
    pub bytes: u64,
    pub format: Format,
    pub packing: Packing,
    pub share: Share,
}

/// Everything to read, in order.
#[derive(Debug)]
pub(crate) struct Inputs {
    pub files: Vec<Input>,
    pub kind: Kind,
    /// Sentences that the user should see.
    pub notes: Vec<String>,
}

/// Ends of names that are looked for in folders.
const KNOWN: &str = ".txt, .md, .lean, .jsonl, .parquet, and .txt, .jsonl as .gz or .zst";

/// The format that a name stands for; `None` for names that are not looked for.
fn format(path: &Path) -> Option<(Format, Packing)> {
    let name = path.file_name()?.to_string_lossy().to_ascii_lowercase();
    let packed = [(".gz", Packing::Gzip), (".zst", Packing::Zstd)];
    let inner = packed.iter().find_map(|&(end, packing)| Some((name.strip_suffix(end)?, packing)));
    let (stem, packing) = inner.unwrap_or((&name, Packing::Plain));
    let format = match stem.rsplit_once('.')?.1 {
        "txt" | "md" => Format::Text,
        "jsonl" | "ndjson" => Format::JsonLines,
        "lean" if packing == Packing::Plain => Format::Lean,
        "parquet" if packing == Packing::Plain => Format::Parquet,
        _ => return None,
    };
    Some((format, packing))
}

/// Finds all files that `named` means, and shares them out.
///
/// # Errors
/// Names the path that is not there, is empty of texts or no regular file; a fraction outside `[0, 1)`.
pub(crate) fn find(named: &[String], val_fraction: f64, seed: u64) -> Result<Inputs> {
    crate::corpus::check_fraction(val_fraction)?;
    let (mut files, mut notes): (Vec<Input>, Vec<String>) = (Vec::new(), Vec::new());
    for name in named {
        let path = Path::new(name);
        let found = match fs::metadata(path) {
            Ok(meta) if meta.is_dir() => in_folder(path)?,
            Ok(_) => vec![path.to_owned()],
            Err(_) if is_pattern(name) => matching(path)?,
            Err(e) => return Err(Error::io("open the text", path, e)),
        };
        let unpacked = path.is_dir().then(|| Unpacked::find(path, &found)).flatten();
        let found = match &unpacked {
            Some(unpacked) => {
                let folders = unpacked.folders.join(", ");
                notes.push(format!("`{name}`: training on {folders}; validation on interpolate"));
                unpacked.train.iter().chain(&unpacked.val).cloned().collect()
            }
            None => found,
        };
        for path in found {
            let meta = fs::metadata(&path).map_err(|e| Error::io("open the text", &path, e))?;
            // Checked before opening: opening a pipe would wait for ever.
            if !meta.is_file() {
                return Err(Error::new(format!("`{}` is no regular file; expected text", path.display())));
            }
            let (format, packing) = format(&path).unwrap_or((Format::Text, Packing::Plain));
            let held_out = unpacked.as_ref().map(|unpacked| unpacked.val.contains(&path));
            let part = held_out.map(|held| Share::All(if held { Part::Val } else { Part::Train }));
            let within = path.strip_prefix(name).ok().filter(|within| within.file_name().is_some());
            let within = within.or(path.file_name().map(Path::new)).unwrap_or(&path).to_string_lossy().into_owned();
            let share = part.unwrap_or(Share::Drawn);
            files.push(Input { name: within, bytes: meta.len(), format, packing, share, path });
        }
    }
    let mut seen = HashSet::new();
    if let Some(twice) = files.iter().find(|input| !seen.insert(&input.path)) {
        return Err(Error::new(format!("`{}` is named twice", twice.path.display())));
    }
    if files.iter().all(|input| input.bytes == 0) {
        let what = if files.len() == 1 { "it is empty" } else { "all of them are empty" };
        return Err(Error::new(format!(
            "`{}`: {} of text, and {what}",
            named.join("`, `"),
            plural(files.len(), "file")
        )));
    }
    let plain = files.iter().filter(|input| matches!(input.format, Format::Text | Format::Lean));
    let kind = match files.iter().all(|input| matches!(input.format, Format::Text | Format::Lean)) {
        true => Kind::of(&plain.map(|input| input.path.clone()).collect::<Vec<_>>()),
        false => Kind::Prose,
    };
    if kind == Kind::Mathematics {
        files.iter_mut().for_each(|input| input.format = Format::Questions);
    }
    share_out(&mut files, val_fraction, seed);
    Ok(Inputs { files, kind, notes })
}

fn plural(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// Decides for files that are one document each. In an order that the seed gives, files go to the held-out part as long as
/// they fit into its share of the bytes; if none fits, the smallest does. A single file is cut.
fn share_out(files: &mut [Input], val_fraction: f64, seed: u64) {
    let whole = |input: &Input| matches!(input.format, Format::Text | Format::Lean) && input.share == Share::Drawn;
    let mut at: Vec<usize> = (0..files.len()).filter(|&n| whole(&files[n]) && files[n].bytes > 0).collect();
    for &n in &at {
        files[n].share = Share::All(Part::Train);
    }
    if val_fraction == 0.0 {
        return;
    }
    let total: u64 = at.iter().map(|&n| files[n].bytes).sum();
    let most = (total as f64 * val_fraction) as u64;
    if let [only] = at[..] {
        let input = &mut files[only];
        if input.packing == Packing::Plain && input.format == Format::Text {
            input.share = Share::CutAt(input.bytes - most);
        }
        return;
    }
    at.sort_by_key(|&n| (mix(hash(files[n].name.as_bytes()) ^ mix(seed)), n));
    let mut held = 0;
    for &n in &at {
        if held + files[n].bytes <= most {
            held += files[n].bytes;
            files[n].share = Share::All(Part::Val);
        }
    }
    if held == 0
        && let Some(&smallest) = at.iter().min_by_key(|&&n| files[n].bytes)
    {
        files[smallest].share = Share::All(Part::Val);
    }
}

fn in_folder(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    collect(folder, &mut found)?;
    found.sort();
    if found.is_empty() {
        let folder = folder.display();
        return Err(Error::new(format!("`{folder}` has no text: no file ends in {KNOWN} (subfolders included)")));
    }
    Ok(found)
}

fn entries(folder: &Path) -> Result<Vec<fs::DirEntry>> {
    let read = |e| Error::io("read the folder", folder, e);
    let hidden = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().starts_with('.');
    let all = fs::read_dir(folder).map_err(read)?.collect::<std::io::Result<Vec<_>>>().map_err(read)?;
    Ok(all.into_iter().filter(|entry| !hidden(entry)).collect())
}

fn collect(folder: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in entries(folder)? {
        let path = entry.path();
        // The entry's own type: a link to a folder could lead round in a circle.
        if entry.file_type().map_err(|e| Error::io("read the folder", folder, e))?.is_dir() {
            collect(&path, found)?;
        } else if format(&path).is_some() && !path.is_dir() {
            found.push(path);
        }
    }
    Ok(())
}

fn is_pattern(name: &str) -> bool {
    name.contains(['*', '?'])
}

/// The files that a pattern means, sorted: `*` and `?` within a name, `**` for any folders. Hidden names are passed over.
fn matching(pattern: &Path) -> Result<Vec<PathBuf>> {
    let mut places = vec![PathBuf::new()];
    for component in pattern.components() {
        let part = component.as_os_str().to_string_lossy().into_owned();
        if !matches!(component, Component::Normal(_)) || !is_pattern(&part) {
            places.iter_mut().for_each(|place| place.push(component));
            places.retain(|place| place.exists());
            continue;
        }
        let mut next = Vec::new();
        for place in places {
            let folder = if place.as_os_str().is_empty() { Path::new(".") } else { &place };
            if part == "**" {
                folders_below(&place, folder, &mut next)?;
            } else if folder.is_dir() {
                for entry in entries(folder)? {
                    let name = entry.file_name().to_string_lossy().into_owned();
                    if fits(part.as_bytes(), name.as_bytes()) {
                        next.push(place.join(name));
                    }
                }
            }
        }
        places = next;
    }
    let mut found: Vec<PathBuf> = places.into_iter().filter(|place| place.is_file()).collect();
    found.sort();
    found.dedup();
    if found.is_empty() {
        return Err(Error::new(format!("no file is called `{}`", pattern.display())));
    }
    Ok(found)
}

fn folders_below(place: &Path, folder: &Path, out: &mut Vec<PathBuf>) -> Result<()> {
    out.push(place.to_owned());
    for entry in entries(folder)? {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            let below = place.join(entry.file_name());
            folders_below(&below, &below, out)?;
        }
    }
    Ok(())
}

/// Whether `name` is as `pattern` says. The last `*` may take more when what follows does not fit: that is all it needs.
fn fits(pattern: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n, mut star) = (0, 0, None);
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(&c) if c == b'?' || c == name[n] => (p, n) = (p + 1, n + 1),
            _ => match star {
                Some((at, taken)) => {
                    star = Some((at, taken + 1));
                    (p, n) = (at + 1, taken + 1);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|&c| c == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    fn find_in(dir: &Scratch, names: &[&str], fraction: f64) -> Result<Inputs> {
        let names: Vec<String> = names.iter().map(|n| dir.path().join(n).to_str().unwrap().to_owned()).collect();
        find(&names, fraction, 0)
    }

    fn names(dir: &Scratch, inputs: &Inputs) -> Vec<String> {
        let of = |input: &Input| input.path.strip_prefix(dir.path()).unwrap().to_str().unwrap().to_owned();
        inputs.files.iter().map(of).collect()
    }

    #[test]
    fn folders_files_and_patterns() {
        let dir = Scratch::new();
        for name in ["a.txt", "b.MD", "c.csv", "d/e.jsonl.zst", "d/f.parquet", "d/g.txt.gz", ".h/i.txt", "d/j/k.lean"] {
            dir.file(name, "x");
        }
        let of = |names_of: &[&str]| names(&dir, &find_in(&dir, names_of, 0.0).unwrap());
        assert_eq!(of(&[""]), ["a.txt", "b.MD", "d/e.jsonl.zst", "d/f.parquet", "d/g.txt.gz", "d/j/k.lean"]);
        assert_eq!(of(&["c.csv", "d/*.parquet"]), ["c.csv", "d/f.parquet"]);
        assert_eq!(of(&["*/*.*.*"]), ["d/e.jsonl.zst", "d/g.txt.gz"]);
        assert_eq!(of(&["**/?.*t*"]), ["a.txt", "d/e.jsonl.zst", "d/f.parquet", "d/g.txt.gz"]);
        assert_eq!(of(&["d/**/*.lean"]), ["d/j/k.lean"]);
        let formats = find_in(&dir, &["d"], 0.0).unwrap();
        let formats: Vec<_> = formats.files.iter().map(|input| (input.format, input.packing)).collect();
        use {Format::*, Packing::*};
        assert_eq!(formats, [(JsonLines, Zstd), (Parquet, Plain), (Text, Gzip), (Lean, Plain)]);
        for (bad, what) in
            [("gone.txt", "gone.txt"), ("*.nope", "no file is called"), ("d/j/none*/x", "no file is called")]
        {
            let e = find_in(&dir, &[bad], 0.0).unwrap_err().to_string();
            assert!(e.contains(what), "{e}");
        }
        assert!(find_in(&dir, &["a.txt", ""], 0.0).unwrap_err().to_string().contains("named twice"));
        assert!(find_in(&dir, &["a.txt"], 1.0).is_err());
        dir.file("e/x.csv", "x");
        assert!(find_in(&dir, &["e"], 0.0).unwrap_err().to_string().contains(".parquet"));
        dir.file("f/x.txt", "");
        assert!(find_in(&dir, &["f"], 0.0).unwrap_err().to_string().contains("empty"));
    }

    #[test]
    fn files_are_shared_out_by_seed_and_size() {
        let dir = Scratch::new();
        for n in 0..20 {
            dir.file(&format!("{n}.txt"), vec![b'x'; 1000 + n]);
        }
        let held = |fraction, seed| -> Vec<PathBuf> {
            let all = find(&[dir.path().to_str().unwrap().to_owned()], fraction, seed).unwrap().files;
            all.into_iter().filter(|f| f.share == Share::All(Part::Val)).map(|f| f.path).collect()
        };
        assert_eq!(held(0.0, 0).len(), 0);
        assert!((3..=4).contains(&held(0.2, 0).len()), "of 20,190 bytes");
        assert_eq!(held(0.25, 0), held(0.25, 0));
        let elsewhere = Scratch::new();
        fs::create_dir(elsewhere.path().join("moved")).unwrap();
        for n in 0..20 {
            elsewhere.file(&format!("moved/{n}.txt"), vec![b'x'; 1000 + n]);
        }
        let moved = find_in(&elsewhere, &["moved"], 0.25).unwrap().files;
        let moved = moved.iter().filter(|f| f.share == Share::All(Part::Val)).map(|f| f.name.as_str());
        assert!(
            held(0.25, 0).iter().map(|path| path.file_name().unwrap().to_str().unwrap()).eq(moved),
            "a folder that moves"
        );
        assert_ne!(held(0.25, 0), held(0.25, 1));
        assert_eq!(held(0.001, 0), [dir.path().join("0.txt")], "at least one");
        let one = find_in(&dir, &["3.txt"], 0.1).unwrap();
        assert_eq!(one.files[0].share, Share::CutAt(1003 - 100));
    }

    #[test]
    fn patterns() {
        for (pattern, name, is) in [
            ("*", "abc", true),
            ("a*c", "abc", true),
            ("a*b*c", "axbxbxc", true),
            ("a?c", "ac", false),
            ("*.txt", "a.txt.gz", false),
            ("", "a", false),
            ("**", "", true),
        ] {
            assert_eq!(fits(pattern.as_bytes(), name.as_bytes()), is, "{pattern} {name}");
        }
    }
}
