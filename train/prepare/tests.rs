use super::*;
use crate::marks::Class;
use crate::scratch::Scratch;

fn options(dir: &Scratch, inputs: &[&str]) -> Options {
    Options {
        inputs: inputs.iter().map(|name| dir.path().join(name).to_str().unwrap().to_owned()).collect(),
        out: dir.path().join("out"),
        existing: Existing::Replace,
        tokenizer: Tokenizer::bytes_with_end(),
        val_fraction: 0.0,
        seed: 0,
        skip_bad: 0,
        replace_invalid: false,
        shard_tokens: SHARD_TOKENS,
        stop: crate::stop::Stop::default(),
        threads: Some(2),
    }
}

fn run(options: &Options) -> Result<(Report, Prepared)> {
    let report = prepare(options, |_| {})?;
    let prepared = Prepared::open(&options.out)?;
    assert_eq!(prepared.meta, report.meta);
    Ok((report, prepared))
}

fn message(options: &Options) -> String {
    let e = prepare(options, |_| {}).expect_err("this must not be prepared").to_string();
    let parent = options.out.parent().unwrap();
    let left =
        parent.read_dir().unwrap().map(|e| e.unwrap().file_name()).any(|n| n.to_string_lossy().contains("partial"));
    assert!(!left, "something half-written is left");
    e
}

/// The documents of a part, as bytes.
fn documents(tokens: &crate::shards::Tokens, tokenizer: &Tokenizer) -> Vec<Vec<u8>> {
    let ids: Vec<u32> = tokens.ids(0..tokens.len()).into_iter().map(|id| id as u32).collect();
    let end = tokenizer.end().unwrap();
    assert!(ids.is_empty() || ids.ends_with(&[end]), "a document ends in its end");
    let pieces = ids.split(|&id| id == end).map(|ids| tokenizer.decode(ids).unwrap());
    let mut all: Vec<Vec<u8>> = pieces.collect();
    all.pop();
    all
}

fn texts(prepared: &Prepared) -> Vec<String> {
    let all = documents(&prepared.train, &prepared.tokenizer);
    all.into_iter().map(|text| String::from_utf8(text).unwrap()).collect()
}

#[test]
fn case_41_text_files_come_back_byte_by_byte() {
    let dir = Scratch::new();
    dir.file("t/a.txt", "🦀 a\r\nb");
    dir.file("t/b.md", [0x92, 0xff, 0]);
    dir.file("t/c.txt", "");
    let (report, prepared) = run(&options(&dir, &["t"])).unwrap();
    let docs = documents(&prepared.train, &prepared.tokenizer);
    assert_eq!(docs, ["🦀 a\r\nb".as_bytes().to_vec(), vec![0x92, 0xff, 0]]);
    let train = &report.meta.train;
    assert_eq!((train.documents, train.tokens, train.bytes, report.meta.vocab), (2, 14, 12, 257));
    assert_eq!((report.meta.val.tokens, report.meta.file_bytes, report.meta.files), (0, 12, 3));
    assert!(prepared.val.is_empty() && report.notes.is_empty());
}

#[test]
fn case_36_counts_are_named_when_there_is_too_little() {
    let dir = Scratch::new();
    dir.file("one.txt", "x");
    dir.file("two.txt", "xy");
    dir.file("none.txt", "");
    dir.file("blank.jsonl", "{\"text\": \"\"}\n\n");
    assert!(message(&options(&dir, &["none.txt"])).contains("empty"));
    assert!(message(&options(&dir, &["one.txt"])).contains("1 tokens in 1 documents"));
    assert!(message(&options(&dir, &["blank.jsonl"])).contains("0 tokens in 0 documents"));
    assert_eq!(run(&options(&dir, &["two.txt"])).unwrap().1.train.len(), 3);
    dir.file("few.jsonl", "{\"text\": \"one two three\"}\n");
    let e = message(&Options { val_fraction: 0.99, ..options(&dir, &["few.jsonl"]) });
    assert!(e.contains("0 tokens") && e.contains("--val-fraction"), "{e}");
}

/// A text with words, numbers, characters of all widths, long lines and stretches without a blank.
fn long_text() -> Vec<u8> {
    let mut text = String::new();
    for n in 0..150_000u64 {
        text += ["word", " 12", "\n\n", "it's ", "é", "日本", "  x", "Tab\t"][(crate::mix::mix(n) % 8) as usize];
    }
    text += &"日".repeat(400_000);
    text += &"a b ".repeat(400_000);
    text.into_bytes()
}

#[test]
fn large_documents_in_pieces_are_what_they_are_as_a_whole() {
    let dir = Scratch::new();
    let text = long_text();
    assert!(text.len() > 3 << 20);
    dir.file("big.txt", &text);
    dir.file("small.txt", "small");
    let (report, prepared) = run(&options(&dir, &["big.txt", "small.txt"])).unwrap();
    assert_eq!(documents(&prepared.train, &prepared.tokenizer), [text.as_slice(), b"small"]);
    assert_eq!(report.meta.torn, 1, "within the stretch without letters");
    let shards = Options { shard_tokens: 1_000_000, ..options(&dir, &["big.txt", "small.txt"]) };
    let (several, cut) = run(&shards).unwrap();
    assert_eq!(several.meta.train.shards.len() as u64, prepared.train.len().div_ceil(1_000_000));
    assert_eq!(cut.train.ids(0..cut.train.len()), prepared.train.ids(0..prepared.train.len()));
    #[cfg(feature = "bpe")]
    {
        let gpt2 = Tokenizer::gpt2().unwrap();
        let text = &text[..text.len() - 3_000_000];
        let text = &text[..text.utf8_chunks().next().unwrap().valid().len()];
        dir.file("big.txt", text.repeat(4));
        let (_, prepared) = run(&Options { tokenizer: gpt2.clone(), ..options(&dir, &["big.txt"]) }).unwrap();
        let expected = gpt2.encode(&text.repeat(4)).unwrap();
        let found: Vec<u32> = prepared.train.ids(0..prepared.train.len()).into_iter().map(|id| id as u32).collect();
        assert_eq!(found.len(), expected.len() + 1);
        assert!(found.starts_with(&expected));
    }
}

#[test]
fn case_43_the_number_of_threads_changes_nothing() {
    let dir = Scratch::new();
    let lines: String = (0..30_000)
        .map(|n| {
            format!("{{\"meta\": {{\"n\": {n}}}, \"text\": \"document {n} \\u00e9\\n{}\"}}\n", "x ".repeat(n % 90))
        })
        .collect();
    dir.file("d/a.jsonl", &lines);
    dir.file("d/b.txt", long_text());
    dir.file("d/c.lean", "theorem x : 1 = 1 := by\n  rfl\n");
    let files = |threads| {
        let options = Options { threads: Some(threads), val_fraction: 0.1, seed: 5, ..options(&dir, &["d"]) };
        let (report, prepared) = run(&options).unwrap();
        assert_eq!(
            (report.meta.train.documents + report.meta.val.documents, prepared.val.has_classes()),
            (30_002, true)
        );
        let mut all: Vec<(String, Vec<u8>)> = fs::read_dir(&options.out)
            .unwrap()
            .map(|entry| entry.unwrap())
            .map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap()))
            .collect();
        all.sort();
        all
    };
    let one = files(1);
    assert_eq!(
        one.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(),
        ["meta.json", "train-00000.classes", "train-00000.tokens", "val-00000.classes", "val-00000.tokens"]
    );
    assert!(one == files(2) && one == files(8));
}

#[test]
fn json_lines_and_what_is_wrong_with_them() {
    let dir = Scratch::new();
    dir.file(
        "a.jsonl",
        "{\"text\": \"one\", \"meta\": {\"set\": [1]}}\n\n{\"meta\": \"a string\", \"text\": \"t\\u0077o\\n\"}\r\n{\"text\":\"three <|endoftext|>\"}",
    );
    let (_, prepared) = run(&options(&dir, &["a.jsonl"])).unwrap();
    assert_eq!(texts(&prepared), ["one", "two\n", "three <|endoftext|>"]);
    for (line, what) in [
        (&b"{\"text\": \"cut off"[..], "line 2 is no JSON object"),
        (b"[1]", "line 2 is no JSON object"),
        (b"{\"txt\": \"x\", \"b\": 1}", "its keys are `b`, `txt`"),
        (b"{\"text\": null}", "no usable `text`"),
        (b"{\"text\": \"\xff\"}", "line 2"),
    ] {
        dir.file("bad.jsonl", [b"{\"text\": \"good\"}\n", line, b"\n{\"text\": \"also\"}\n", line].concat());
        let e = message(&options(&dir, &["bad.jsonl"]));
        assert!(e.contains("bad.jsonl") && e.contains(what) && e.contains("--skip-bad"), "{e}");
        let one = message(&Options { skip_bad: 1, ..options(&dir, &["bad.jsonl"]) });
        assert!(one.contains("line 4") && one.contains("one more than the 1"), "{one}");
        let (report, prepared) = run(&Options { skip_bad: 2, ..options(&dir, &["bad.jsonl"]) }).unwrap();
        assert_eq!((texts(&prepared).join(" ").as_str(), report.meta.skipped, report.bad.len()), ("good also", 2, 2));
        assert!(report.notes.iter().any(|note| note.contains("2 records")), "{:?}", report.notes);
    }
}

#[test]
fn questions_and_proofs_are_marked() {
    let dir = Scratch::new();
    dir.file("dm/train-easy/a__b.txt", "1+1\n2\n2+2\n4\n");
    dir.file("dm/interpolate/a__b.txt", "3+3\n6\n");
    dir.file("dm/extrapolate/a__b.txt", "9+9\n18\n");
    let (report, prepared) = run(&Options { val_fraction: 0.5, ..options(&dir, &["dm"]) }).unwrap();
    assert_eq!(texts(&prepared), ["1+1\n2\n", "2+2\n4\n"]);
    assert_eq!(documents(&prepared.val, &prepared.tokenizer), [b"3+3\n6\n"]);
    assert_eq!((report.meta.kind, report.meta.train.answer_tokens), (Kind::Mathematics, Some(4)));
    assert!(report.notes[0].contains("validation on interpolate"), "{:?}", report.notes);
    let classes = |tokens: &crate::shards::Tokens| {
        let mut out = Vec::new();
        tokens.classes(0..tokens.len(), &mut out);
        out.iter().map(|class| class.map_or('-', |c: Class| c.name().chars().next().unwrap())).collect::<String>()
    };
    assert_eq!(classes(&prepared.train), "----aa-----aa-");
    dir.file("odd/a__b.txt", "1+1\n2\n3+3\n");
    assert!(message(&options(&dir, &["odd"])).contains("line 3: a question without"));

    dir.file("l/a.lean", "def a := 1\ntheorem b : 1 = 1 := by rfl\n");
    dir.file("l/b.lean", "def c := 1");
    let (report, prepared) = run(&Options { val_fraction: 0.1, ..options(&dir, &["l"]) }).unwrap();
    assert_eq!(documents(&prepared.val, &prepared.tokenizer), [b"def c := 1"], "the smallest file");
    assert_eq!(
        (report.meta.kind, report.meta.train.proof_tokens, report.meta.val.source_tokens),
        (Kind::Lean, Some(5), Some(10))
    );
    assert_eq!(classes(&prepared.train), format!("{}ppppp-", "s".repeat(34)));
    #[cfg(feature = "bpe")]
    {
        let gpt2 = Tokenizer::gpt2().unwrap();
        let (_, prepared) =
            run(&Options { tokenizer: gpt2.clone(), ..options(&dir, &["l/a.lean", "dm/interpolate/a__b.txt"]) })
                .unwrap();
        // ` by`, then ` r` `fl` and the line end; a text beside Lean is no list of questions.
        let ids: Vec<u32> = prepared.train.ids(0..prepared.train.len()).into_iter().map(|id| id as u32).collect();
        let words: Vec<String> =
            ids.iter().map(|&id| String::from_utf8(gpt2.token(id).unwrap().to_vec()).unwrap()).collect();
        let marks = classes(&prepared.train);
        let proof: String =
            words.iter().zip(marks.chars()).filter(|(_, c)| *c == 'p').map(|(w, _)| w.as_str()).collect();
        assert_eq!(proof, " rfl\n");
        assert!(marks.ends_with("------"), "{marks}");
    }
}

#[test]
fn one_text_is_cut_and_several_are_drawn() {
    let dir = Scratch::new();
    dir.file("one.txt", "line\n".repeat(200));
    let (report, prepared) = run(&Options { val_fraction: 0.1, ..options(&dir, &["one.txt"]) }).unwrap();
    assert_eq!((report.meta.train.bytes, report.meta.val.bytes), (905, 95), "behind the next line end");
    assert_eq!((report.meta.train.documents, prepared.val.len()), (1, 96));
    let lines: String = (0..100).map(|n| format!("{{\"text\":\"{n:02}\"}}\n")).collect();
    dir.file("many.jsonl", lines);
    let held = |seed| {
        let (_, prepared) = run(&Options { val_fraction: 0.1, seed, ..options(&dir, &["many.jsonl"]) }).unwrap();
        let held = documents(&prepared.val, &prepared.tokenizer);
        assert_eq!((held.len(), texts(&prepared).len()), (10, 90));
        held
    };
    assert_eq!(held(1), held(1));
    assert_ne!(held(1), held(2));
    dir.file("few.jsonl", "{\"text\":\"only one\"}");
    let (report, _) = run(&Options { val_fraction: 0.001, ..options(&dir, &["few.jsonl"]) }).unwrap();
    assert!(report.notes.iter().any(|note| note.contains("nothing is held out")), "{:?}", report.notes);
}

#[test]
fn folders_that_are_there() {
    let dir = Scratch::new();
    dir.file("a.txt", "some text");
    dir.file("out/mine.txt", "keep");
    assert!(message(&options(&dir, &["a.txt"])).contains("other things"));
    assert!(dir.path().join("out/mine.txt").exists());
    let file = Options { out: dir.path().join("a.txt"), ..options(&dir, &["a.txt"]) };
    assert!(message(&file).contains("no folder"));
    let new = Options { out: dir.path().join("deep/new"), existing: Existing::Refuse, ..options(&dir, &["a.txt"]) };
    run(&new).unwrap();
    assert!(message(&new).contains("--replace"));
    dir.file("a.txt", "another text");
    let (_, prepared) = run(&Options { existing: Existing::Replace, ..new.clone() }).unwrap();
    assert_eq!(texts(&prepared), ["another text"]);
    // What a stopped process left is taken over; where one works, nothing is touched.
    dir.file("deep/.new.partial/train-00000.tokens", "half");
    run(&Options { existing: Existing::Replace, ..new.clone() }).unwrap();
    let folder = Folder::new(&new.out, Existing::Replace).unwrap();
    let e = prepare(&Options { existing: Existing::Replace, ..new.clone() }, |_| {}).unwrap_err().to_string();
    assert!(e.contains("another process"), "{e}");
    drop(folder);
    assert_eq!(fs::read_dir(dir.path().join("deep")).unwrap().count(), 1);
}

#[test]
fn a_folder_that_was_changed_is_not_opened() {
    let dir = Scratch::new();
    dir.file("a.txt", "some text");
    let options = options(&dir, &["a.txt"]);
    run(&options).unwrap();
    let (shard, meta) = (options.out.join("train-00000.tokens"), options.out.join(META));
    let good = (fs::read(&shard).unwrap(), fs::read_to_string(&meta).unwrap());
    let e = |change: &dyn Fn()| {
        change();
        let e = Prepared::open(&options.out).expect_err("a change must be seen").to_string();
        fs::write(&shard, &good.0).unwrap();
        fs::write(&meta, &good.1).unwrap();
        assert!(Prepared::open(&options.out).is_ok());
        e
    };
    let truncated = e(&|| fs::write(&shard, &good.0[..good.0.len() - 1]).unwrap());
    let size = good.0.len();
    assert!(truncated.contains(&format!("{} bytes", size - 1)) && truncated.contains(&size.to_string()), "{truncated}");
    assert!(e(&|| fs::remove_file(&shard).unwrap()).contains("train-00000.tokens"));
    let change = |from: &str, to: &str| e(&|| fs::write(&meta, good.1.replace(from, to)).unwrap());
    assert!(change("tokens 1\"", "tokens 2\"").contains("kumiki tokens 2"));
    assert!(change("\"vocab\": 257", "\"vocab\": 256").contains("speaks of 256 tokens"));
    assert!(change("byte-eot", "byte-eos").contains("tokenizer.json"));
    assert!(change("train-00000.tokens", "../train-00000.tokens").contains("not in the folder"));
    assert!(change("\"tokens\": 10", "\"tokens\": 11").contains("11"));
    assert!(change("\"seed\": 0", "\"sead\": 0").contains("sead"));
    assert!(change("{", "").contains("no JSON"));
}

#[test]
fn a_full_disk_is_said_with_what_was_needed() {
    let full = || io::Error::from(ErrorKind::StorageFull);
    let e = failed(Path::new("out"), full(), 500_000_000, 2e9);
    assert!(e.to_string().contains("about 2000.0 MB were needed, and 500.0 MB"), "{e}");
    let other = failed(Path::new("out"), io::Error::other("odd"), 5, 10.0).to_string();
    assert!(other.contains("cannot write to `out`: odd"), "{other}");
}

#[cfg(feature = "bpe")]
#[test]
fn case_41_invalid_utf8_is_named_or_replaced() {
    let dir = Scratch::new();
    let mut text = "a word ".repeat(200_000).into_bytes();
    let at = 1_300_003;
    text[at] = 0x92;
    dir.file("a.txt", &text);
    let gpt2 = Options { tokenizer: Tokenizer::gpt2().unwrap(), ..options(&dir, &["a.txt"]) };
    let e = message(&gpt2);
    assert!(e.contains(&format!("byte {at}: 0x92")) && e.contains("--replace-invalid"), "{e}");
    let (report, prepared) = run(&Options { replace_invalid: true, ..gpt2 }).unwrap();
    assert_eq!((report.meta.replaced, report.meta.train.bytes), (1, text.len() as u64 + 2));
    let mut expected = text.clone();
    expected.splice(at..=at, "\u{fffd}".bytes());
    assert_eq!(documents(&prepared.train, &prepared.tokenizer), [expected]);
    assert_eq!((report.meta.vocab, report.meta.end, report.meta.tokenizer.as_str()), (50_257, 50_256, "gpt2"));
}

#[cfg(feature = "hugging-face")]
#[test]
fn a_vocabulary_of_ones_own_is_kept_in_the_folder() {
    let dir = Scratch::new();
    let text = "the theme of the thesis is there, the other themes are elsewhere\n".repeat(100);
    dir.file("a.txt", &text);
    let tokenizer = Tokenizer::train(280, std::iter::once(text.clone())).unwrap();
    let (_, prepared) = run(&Options { tokenizer: tokenizer.clone(), ..options(&dir, &["a.txt"]) }).unwrap();
    assert_eq!((&prepared.tokenizer, texts(&prepared)), (&tokenizer, vec![text]));
    let other = Tokenizer::train(260, std::iter::once("ab abc abcd ".repeat(99))).unwrap();
    fs::write(dir.path().join("out/tokenizer.json"), other.file().unwrap()).unwrap();
    let e = Prepared::open(&dir.path().join("out")).unwrap_err().to_string();
    assert!(e.contains("tokenizer.json") && e.contains(tokenizer.name()), "{e}");
}

#[cfg(feature = "hugging-face")]
#[test]
fn a_vocabulary_is_learned_from_files() {
    let dir = Scratch::new();
    let text = "the theme of the thesis is there, the other themes are elsewhere\n".repeat(100);
    dir.file("a.txt", &text);
    dir.file("b.jsonl", format!("{{\"text\": {text:?}}}\nnot json\n"));
    let names: Vec<String> = ["a.txt", "b.jsonl"].map(|n| dir.path().join(n).to_str().unwrap().to_owned()).into();
    let mut last = Progress::default();
    let learned = learn(&names, 280, 1, |progress| last = progress).unwrap();
    assert_eq!(learned.name(), Tokenizer::train(280, [text.clone(), text].into_iter()).unwrap().name());
    assert_eq!((last.done, last.total > 10_000), (last.total, true));
    let e = learn(&names, 280, 0, |_| {}).unwrap_err().to_string();
    assert!(e.contains("b.jsonl`, line 2") && e.contains("--skip-bad"), "{e}");
}

#[cfg(feature = "compressed")]
#[test]
fn compressed_files_of_several_frames_and_cut_ones() {
    use std::io::Write;
    let dir = Scratch::new();
    let line = |n: u32| format!("{{\"text\": \"document {n}\"}}\n").into_bytes();
    let zst = |bytes: &[u8]| zstd::bulk::compress(bytes, 3).unwrap();
    let gz = |bytes: &[u8]| {
        let mut out = flate2::write::GzEncoder::new(Vec::new(), Default::default());
        out.write_all(bytes).unwrap();
        out.finish().unwrap()
    };
    // A frame may end within a line.
    let (first, second) = ([line(1), line(2)].concat(), line(3));
    let cut = first.len() - 7;
    dir.file("a.jsonl.zst", [zst(&first[..cut]), zst(&[&first[cut..], &second].concat())].concat());
    dir.file("b.jsonl.gz", [gz(&first), gz(&second)].concat());
    dir.file("c.txt.zst", zst(b"plain"));
    let (_, prepared) = run(&options(&dir, &["a.jsonl.zst", "b.jsonl.gz", "c.txt.zst"])).unwrap();
    let three = ["document 1", "document 2", "document 3"];
    assert_eq!(texts(&prepared), [&three[..], &three, &["plain"]].concat());
    let whole = zst(&first.repeat(50));
    dir.file("a.jsonl.zst", &whole[..whole.len() - 4]);
    assert!(message(&options(&dir, &["a.jsonl.zst"])).contains("a.jsonl.zst"));
    let whole = gz(&first.repeat(50));
    dir.file("b.jsonl.gz", &whole[..whole.len() - 4]);
    assert!(message(&options(&dir, &["b.jsonl.gz"])).contains("b.jsonl.gz"));
    dir.file("c.txt.zst", "no zstd");
    assert!(message(&options(&dir, &["c.txt.zst"])).contains("c.txt.zst"));
}

#[cfg(not(feature = "compressed"))]
#[test]
fn what_was_left_out_is_named() {
    let dir = Scratch::new();
    dir.file("a.jsonl.zst", "x");
    assert!(message(&options(&dir, &["a.jsonl.zst"])).contains("feature `compressed`"));
}

#[cfg(feature = "parquet")]
mod tables {
    use super::*;
    use parquet::basic::Compression;
    use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;

    /// Writes a table of a number and an optional text, in groups of these.
    fn table(dir: &Scratch, name: &str, column: &str, compression: Compression, groups: &[&[Option<&str>]]) {
        let schema = format!("message t {{ REQUIRED INT64 id; OPTIONAL BINARY {column} (UTF8); }}");
        let properties = WriterProperties::builder().set_compression(compression).build();
        let file = fs::File::create(dir.path().join(name)).unwrap();
        let schema = Arc::new(parse_message_type(&schema).unwrap());
        let mut writer = SerializedFileWriter::new(file, schema, Arc::new(properties)).unwrap();
        for rows in groups {
            let mut group = writer.next_row_group().unwrap();
            let mut ids = group.next_column().unwrap().unwrap();
            let numbers: Vec<i64> = (0..rows.len() as i64).collect();
            ids.typed::<Int64Type>().write_batch(&numbers, None, None).unwrap();
            ids.close().unwrap();
            let mut texts = group.next_column().unwrap().unwrap();
            let values: Vec<ByteArray> = rows.iter().flatten().map(|&text| text.into()).collect();
            let levels: Vec<i16> = rows.iter().map(|text| text.is_some().into()).collect();
            texts.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None).unwrap();
            texts.close().unwrap();
            group.close().unwrap();
        }
        writer.close().unwrap();
    }

    #[test]
    fn groups_of_rows_and_missing_texts() {
        let dir = Scratch::new();
        let many: Vec<String> = (0..1000).map(|n| format!("text {n} 🦀")).collect();
        let many: Vec<Option<&str>> = many.iter().map(|text| Some(text.as_str())).collect();
        let groups = [&[Some("one"), None, Some(""), Some("two")][..], &many, &[None]];
        table(&dir, "a.parquet", "text", Compression::SNAPPY, &groups);
        table(&dir, "b.parquet", "text", Compression::ZSTD(Default::default()), &groups[..1]);
        let (report, prepared) = run(&options(&dir, &["a.parquet", "b.parquet"])).unwrap();
        let found = texts(&prepared);
        assert_eq!(
            (found.len(), &found[..2], found[1001].as_str()),
            (1004, &["one".into(), "two".into()][..], "text 999 🦀")
        );
        assert_eq!((report.meta.train.documents, report.meta.empty), (1004, 5));
        let said = "5 documents without text were passed over".to_owned();
        assert!(report.notes.contains(&said), "{:?}", report.notes);
    }

    #[test]
    fn tables_without_texts_name_their_columns() {
        let dir = Scratch::new();
        table(&dir, "a.parquet", "content", Compression::UNCOMPRESSED, &[&[Some("x")]]);
        let e = message(&options(&dir, &["a.parquet"]));
        assert!(e.contains("no column `text`") && e.contains("`id`, `content`"), "{e}");
        dir.file("b.parquet", "PAR1 but no table");
        assert!(message(&options(&dir, &["b.parquet"])).contains("b.parquet` is no Parquet file"));
        table(&dir, "c.parquet", "text", Compression::SNAPPY, &[&[Some("a text of some length"); 2000]]);
        let bytes = fs::read(dir.path().join("c.parquet")).unwrap();
        dir.file("c.parquet", &bytes[..bytes.len() - 3]);
        assert!(message(&options(&dir, &["c.parquet"])).contains("c.parquet"));
    }
}
