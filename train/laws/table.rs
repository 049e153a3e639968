//! Tables of trained models that this program did not need to make: CSV, JSON, or the `results.json` of a run.
//!
//! | what | column of CSV, key of JSON; any case |
//! |---|---|
//! | N | `params`, else `N` |
//! | D | `tokens`, else `D` |
//! | loss | `loss`, else `nll`, `val_nll`, `second_half_nll` |
//! | model | `model`, may be missing |
//! | corpus | `corpus`, may be missing |
//!
//! JSON is an array of objects, or an object that has one as `rows`; a key whose value is `null` counts as missing. Other
//! columns and keys are passed over. Points of one model on one corpus make a series: a law holds for one of each.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use csv::{ReaderBuilder, StringRecord, Trim};
use serde_json::{Map, Value};

use super::Point;
use crate::suggest::nearest;
use crate::{Error, Result};

/// The largest file, in bytes: a line for every model that anybody has trained is less.
pub const LARGEST: u64 = 16 << 20;

/// The longest name of a model or a corpus, in letters.
const LONGEST_NAME: usize = 100;

const PARAMS: &[&str] = &["params", "N"];
const TOKENS: &[&str] = &["tokens", "D"];
const LOSS: &[&str] = &["loss", "nll", "val_nll", "second_half_nll"];

/// The points of one model on one corpus, in the order of the file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Series {
    /// The model, if the table says so.
    pub model: Option<String>,
    /// The corpus, if the table says so.
    pub corpus: Option<String>,
    /// Its points.
    pub points: Vec<Point>,
}

impl Series {
    /// What to call it: `tango`, `tango on book`, or `all` where the table has no names.
    pub fn name(&self) -> String {
        match (&self.model, &self.corpus) {
            (Some(model), Some(corpus)) => format!("{model} on {corpus}"),
            (Some(name), None) | (None, Some(name)) => name.clone(),
            (None, None) => "all".to_owned(),
        }
    }
}

/// Reads a table: series in order of appearance, each with at least one point. Corpora are only named when there are several.
///
/// # Errors
/// When the file cannot be read, is larger than [`LARGEST`], is no table, lacks a column, or has a value that is
/// no number above 0; says where.
pub fn read(path: &Path) -> Result<Vec<Series>> {
    let meta = std::fs::metadata(path).map_err(|e| Error::io("read the table", path, e))?;
    // A pipe would be waited for, a device read, for ever.
    if !meta.is_file() {
        return Err(Error::new(format!("the table `{}` is no regular file", path.display())));
    }
    let file = File::open(path).map_err(|e| Error::io("read the table", path, e))?;
    let mut bytes = Vec::new();
    file.take(LARGEST + 1).read_to_end(&mut bytes).map_err(|e| Error::io("read the table", path, e))?;
    if bytes.len() as u64 > LARGEST {
        return Err(Error::new(format!("the table `{}` has more than {LARGEST} bytes", path.display())));
    }
    parse(&bytes).map_err(|e| Error::new(format!("`{}`{e}", path.display())))
}

/// What [`read`] makes of a file's contents. Errors go on where the file's name ends.
fn parse(bytes: &[u8]) -> Result<Vec<Series>> {
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let text = std::str::from_utf8(bytes).map_err(|e| {
        let line = 1 + bytes[..e.valid_up_to()].iter().filter(|&&byte| byte == b'\n').count();
        Error::new(format!(", line {line}: expected text in UTF-8"))
    })?;
    let series = match text.trim_start().chars().next() {
        None => return Err(Error::new(" is empty; expected a table with params, tokens and loss")),
        Some('[' | '{') => json(text)?,
        Some(_) => comma_separated(text)?,
    };
    if series.is_empty() {
        return Err(Error::new(" has no rows; expected one for every trained model"));
    }
    Ok(unnamed(series))
}

/// Without the name of the corpus where there is only one.
fn unnamed(mut series: Vec<Series>) -> Vec<Series> {
    if series.iter().all(|one| one.corpus == series[0].corpus) {
        series.iter_mut().for_each(|one| one.corpus = None);
    }
    series
}

/// Series as they are read. A file may have a name of its own in every line: places are looked up.
#[derive(Default)]
struct Sorted {
    series: Vec<Series>,
    places: BTreeMap<(Option<String>, Option<String>), usize>,
}

impl Sorted {
    fn add(&mut self, model: Option<String>, corpus: Option<String>, point: Point) {
        let place = *self.places.entry((model.clone(), corpus.clone())).or_insert(self.series.len());
        if place == self.series.len() {
            self.series.push(Series { model, corpus, points: vec![] });
        }
        self.series[place].points.push(point);
    }
}

/// A name as it may be shown; `None` for nothing.
fn name(text: &str, at: impl Fn() -> String) -> Result<Option<String>> {
    if text.chars().any(char::is_control) || text.chars().count() > LONGEST_NAME {
        return Err(Error::new(format!(
            "{}: expected a name of at most {LONGEST_NAME} letters without control characters, found {:?}",
            at(),
            clipped(text)
        )));
    }
    Ok((!text.is_empty()).then(|| text.to_owned()))
}

/// A value for an error: the start of it will do.
fn clipped(text: &str) -> String {
    let mut short: String = text.chars().take(40).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}

fn positive(value: Option<f64>, found: &str, at: impl Fn() -> String) -> Result<f64> {
    value.filter(|value| value.is_finite() && *value > 0.0).ok_or_else(|| {
        Error::new(format!("{}: expected a finite number above 0, found `{}`", at(), clipped(found).escape_debug()))
    })
}

fn comma_separated(text: &str) -> Result<Vec<Series>> {
    let mut reader = ReaderBuilder::new().trim(Trim::All).flexible(true).from_reader(text.as_bytes());
    let failed = |e: csv::Error| Error::new(format!(" is no table of comma-separated values: {e}"));
    let header = reader.headers().map_err(failed)?.clone();
    let columns: Vec<&str> = header.iter().collect();
    let named = |name: &str| -> Result<Option<usize>> {
        let mut found = (0..columns.len()).filter(|&i| columns[i].eq_ignore_ascii_case(name));
        match (found.next(), found.next()) {
            (Some(_), Some(_)) => Err(Error::new(format!(", line 1: column `{name}` is there twice"))),
            (at, _) => Ok(at),
        }
    };
    let column = |names: &[&str]| -> Result<usize> {
        for name in names {
            if let Some(at) = named(name)? {
                return Ok(at);
            }
        }
        Err(missing("column", ", line 1", names, &columns))
    };
    let [params, tokens, loss] = [column(PARAMS)?, column(TOKENS)?, column(LOSS)?];
    let (model, corpus) = (named("model")?, named("corpus")?);
    let mut sorted = Sorted::default();
    let mut row = StringRecord::new();
    while reader.read_record(&mut row).map_err(failed)? {
        // A record begins, to the reader, where the last one ended: at the empty lines before it.
        let (from, first) = row.position().map_or((0, 0), |at| (at.byte() as usize, at.line()));
        let empty = text.as_bytes()[from..].iter().take_while(|byte| b"\r\n".contains(byte));
        let line = first + empty.filter(|&&byte| byte == b'\n').count() as u64;
        if row.len() != columns.len() {
            return Err(Error::new(format!(
                ", line {line}: expected {} values as in the header, found {}",
                columns.len(),
                row.len()
            )));
        }
        let at = |column: usize| format!(", line {line}, column {} (`{}`)", column + 1, clipped(&header[column]));
        let number = |column: usize| positive(row[column].parse().ok(), &row[column], || at(column));
        let point = Point { params: number(params)?, tokens: number(tokens)?, loss: number(loss)? };
        let named = |column: Option<usize>| column.map_or(Ok(None), |column| name(&row[column], || at(column)));
        sorted.add(named(model)?, named(corpus)?, point);
    }
    Ok(sorted.series)
}

/// What is said when none of `names` is among those that are there.
fn missing(kind: &str, place: &str, names: &[&str], found: &[&str]) -> Error {
    let there: Vec<&str> = found.iter().copied().filter(|name| !name.is_empty()).collect();
    let hint = nearest(names[0], &there).map_or(String::new(), |near| format!("; is it `{}`?", clipped(near)));
    let list: String = there.iter().take(20).map(|name| format!(" `{}`", clipped(name).escape_debug())).collect();
    let list = if list.is_empty() { " nothing".to_owned() } else { list };
    let names = names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(" or ");
    Error::new(format!("{place}: expected a {kind} {names}, found{list}{hint}"))
}

fn json(text: &str) -> Result<Vec<Series>> {
    let value: Value = serde_json::from_str(text).map_err(|e| Error::new(format!(" is no JSON: {e}")))?;
    let rows = match &value {
        Value::Array(rows) => rows,
        Value::Object(object) => object.get("rows").and_then(Value::as_array).ok_or_else(|| {
            Error::new(": expected an array of objects, or an object with such an array as `rows`, found neither")
        })?,
        _ => return Err(Error::new(": expected an array of objects")),
    };
    let mut sorted = Sorted::default();
    for (i, row) in rows.iter().enumerate() {
        let place = format!(", row {}", i + 1);
        let row =
            row.as_object().ok_or_else(|| Error::new(format!("{place}: expected an object, found {}", kind(row))))?;
        let number = |names: &[&str]| -> Result<f64> {
            let (key, value) = names
                .iter()
                .find_map(|name| of(row, name))
                .ok_or_else(|| missing("key", &place, names, &row.keys().map(String::as_str).collect::<Vec<_>>()))?;
            let found = if value.is_number() { value.to_string() } else { kind(value).to_owned() };
            positive(value.as_f64(), &found, || format!("{place}, `{}`", clipped(key)))
        };
        let named = |key: &str| match of(row, key) {
            None => Ok(None),
            Some((_, Value::String(text))) => name(text.trim(), || format!("{place}, `{key}`")),
            Some((_, other)) => Err(Error::new(format!("{place}, `{key}`: expected a text, found {}", kind(other)))),
        };
        let point = Point { params: number(PARAMS)?, tokens: number(TOKENS)?, loss: number(LOSS)? };
        sorted.add(named("model")?, named("corpus")?, point);
    }
    Ok(sorted.series)
}

/// The key of that name in any case, and its value, unless it is `null`.
fn of<'a>(row: &'a Map<String, Value>, name: &str) -> Option<(&'a str, &'a Value)> {
    let found = row.iter().find(|(key, value)| key.eq_ignore_ascii_case(name) && !value.is_null());
    found.map(|(key, value)| (key.as_str(), value))
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    fn points(series: &[Series]) -> Vec<(String, Vec<f64>)> {
        let of = |one: &Series| (one.name(), one.points.iter().flat_map(|p| [p.params, p.tokens, p.loss]).collect());
        series.iter().map(of).collect()
    }

    #[test]
    fn tables_of_every_kind_give_the_same_points() {
        let all = vec![("all".to_owned(), vec![1e6, 2e7, 3.5, 3e6, 2e7, 3.25])];
        for text in [
            "params,tokens,loss\n1e6,2e7,3.5\n3e6,2e7,3.25\n",
            "\u{feff}N, D, nll\r\n1000000, 20000000, 3.5\r\n\r\n3e6,2e7,3.25",
            "note,LOSS,Tokens,Params\n\"a, b\",\"3.5\",2e7,1e6\n,3.25,2e7,3e6\n",
            "loss,val_nll,n,d\n3.5,9,1e6,2e7\n3.25,9,3e6,2e7\n",
            r#"[{"params": 1000000, "tokens": 2e7, "loss": 3.5, "x": []}, {"N": 3e6, "D": 2e7, "val_nll": 3.25}]"#,
            "\u{feff} {\"rows\": [{\"n\": 1e6, \"d\": 2e7, \"loss\": null, \"val_nll\": 3.5, \"second_half_nll\": 1},
              {\"params\": 3e6, \"tokens\": 2e7, \"val_nll\": null, \"second_half_nll\": 3.25}], \"finished\": true}",
        ] {
            assert_eq!(points(&parse(text.as_bytes()).unwrap_or_else(|e| panic!("{text}: {e}"))), all, "{text}");
        }
    }

    #[test]
    fn models_and_corpora_make_series() {
        let csv = "model,corpus,params,tokens,loss\nb,x,1,2,3\na,x,4,5,6\nb,x,7,8,9\n";
        let expected = [("b".to_owned(), vec![1.0, 2.0, 3.0, 7.0, 8.0, 9.0]), ("a".to_owned(), vec![4.0, 5.0, 6.0])];
        assert_eq!(points(&parse(csv.as_bytes()).unwrap()), expected);
        let json = r#"[{"model": "a", "corpus": "x", "N": 1, "D": 2, "loss": 3},
                       {"model": "a", "corpus": "y", "N": 1, "D": 2, "loss": 4}]"#;
        let names = |text: &str| parse(text.as_bytes()).unwrap().iter().map(Series::name).collect::<Vec<_>>();
        assert_eq!(names(json), ["a on x", "a on y"]);
        assert_eq!(names("model,n,d,loss\n,1,2,3\na,1,2,3\n"), ["all", "a"]);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_place() {
        let long = format!("model,n,d,loss\n{},1,2,3", "x".repeat(101));
        for (text, phrase) in [
            ("", " is empty"),
            (" \n\r\n", " is empty"),
            ("params,tokens,loss\n", " has no rows"),
            ("[]", " has no rows"),
            ("{\"rows\": []}", " has no rows"),
            ("params,loss\n1,2\n", ", line 1: expected a column `tokens` or `D`, found `params` `loss`"),
            ("param,tokens,loss\n1,2,3\n", "is it `param`?"),
            ("params;tokens;loss\n1;2;3\n", "expected a column `params` or `N`, found `params;tokens;loss`"),
            ("n,N,d,loss\n1,1,2,3\n", "line 1: column `N` is there twice"),
            ("n,d,loss\n1,2,3\n1,2\n", ", line 3: expected 3 values as in the header, found 2"),
            ("n,d,loss\n1,2,3,4\n", ", line 2: expected 3 values as in the header, found 4"),
            ("n,d,loss\n1,2,3\n\n1,x,3\n", ", line 4, column 2 (`d`): expected a finite number above 0, found `x`"),
            ("n,d,loss\n1,2,nan\n", "column 3 (`loss`): expected a finite number above 0, found `nan`"),
            ("n,d,loss\n-1,2,3\n", "found `-1`"),
            ("n,d,loss\n1,inf,3\n", "found `inf`"),
            ("n,d,loss\n1,1e999,3\n", "found `1e999`"),
            ("n,d,loss\n1,0,3\n", "found `0`"),
            ("n,d,loss\n1,2,\n", "found ``"),
            ("n,d,loss\n1,\"2,3\n", "line 2"),
            (&long, "expected a name of at most 100 letters"),
            ("model,n,d,loss\na\u{1b}[1m,1,2,3", "without control characters"),
            ("{", "is no JSON: EOF while parsing an object at line 1 column 1"),
            ("[1]", ", row 1: expected an object, found a number"),
            ("{\"a\": 1}", "expected an array of objects, or an object with such an array as `rows`"),
            ("{\"rows\": 3}", "found neither"),
            (
                "[{\"n\": 1, \"d\": 2}]",
                ", row 1: expected a key `loss` or `nll` or `val_nll` or `second_half_nll`, found",
            ),
            ("[{}]", "found nothing"),
            (
                "[{\"n\": \"1\", \"d\": 2, \"loss\": 3}]",
                ", row 1, `n`: expected a finite number above 0, found `a text`",
            ),
            ("[{\"n\": 1, \"d\": -2, \"loss\": 3}]", "found `-2`"),
            ("[{\"n\": 1, \"d\": 1e999, \"loss\": 3}]", "number out of range"),
            ("[{\"n\": 1, \"d\": 2, \"loss\": 3, \"model\": 4}]", "`model`: expected a text, found a number"),
        ] {
            let error = parse(text.as_bytes()).expect_err(text).to_string();
            assert!(error.contains(phrase), "{text:?}: {error}");
            assert!(!error.contains('\u{1b}') && error.len() < 400, "{error}");
        }
        let deep = "[".repeat(1_000_000);
        assert!(parse(deep.as_bytes()).unwrap_err().to_string().contains("recursion limit"));
        let bytes = b"n,d,loss\n1,2,3\n1,\xff,3\n";
        assert!(parse(bytes).unwrap_err().to_string().contains(", line 3: expected text in UTF-8"));
    }

    #[test]
    fn files_are_named() {
        let dir = Scratch::new();
        let error = |path: &Path| read(path).unwrap_err().to_string();
        assert_eq!(read(&dir.file("a.csv", "n,d,loss\n1,2,3\n")).unwrap().len(), 1);
        let bad = dir.file("bad.csv", "n,d,loss\n1,2,x\n");
        assert!(error(&bad).contains("bad.csv`, line 2, column 3 (`loss`)"), "{}", error(&bad));
        assert!(error(&dir.path().join("absent")).contains("cannot read the table"));
        assert!(error(dir.path()).contains("is no regular file"));
        let huge = dir.file("huge.csv", vec![b' '; LARGEST as usize + 1]);
        assert!(error(&huge).contains("has more than 16777216 bytes"), "{}", error(&huge));
    }

    #[test]
    fn any_bytes_are_read_or_refused() {
        let mut rng = kumiki_tensor::Rng::new(5);
        let pieces = [
            "n", ",", "d", "loss", "\n", "\r", "\"", "1", "-", "e9", "{", "}", "[", "]", ":", "rows", "\u{feff}", "é",
            "\0",
        ];
        for _ in 0..20_000 {
            let count = rng.below(30);
            let tail: String = (0..count).map(|_| pieces[rng.below(pieces.len() as u64) as usize]).collect();
            let head = ["", "n,d,loss\n", "[{\"n\":1,\"d\":2,\"loss\":", "model,n,d,loss\n\"a"][rng.below(4) as usize];
            if let Ok(series) = parse(format!("{head}{tail}").as_bytes()) {
                assert!(series.iter().all(|one| !one.points.is_empty()));
            }
        }
    }
}
