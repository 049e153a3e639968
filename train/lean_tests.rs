//! Proofs are written between `⟪` and `⟫` here, which the lexer does not get to see.

use super::*;

/// What is a proof in `text`, put between the marks again.
fn marked(bytes: &[u8]) -> Vec<u8> {
    let (mut lexer, mut out, mut at, mut inside) = (Lexer::default(), Vec::new(), 0, false);
    while let Some((range, class)) = lexer.next(bytes) {
        assert!(range.start == at && range.end > at, "stretches follow one another: {range:?} after {at}");
        at = range.end;
        if inside != (class == Class::Proof) {
            inside = !inside;
            out.extend_from_slice(if inside { "⟪" } else { "⟫" }.as_bytes());
        }
        out.extend_from_slice(&bytes[range]);
    }
    assert_eq!(at, bytes.len());
    if inside {
        out.extend_from_slice("⟫".as_bytes());
    }
    out
}

#[track_caller]
fn check(expected: &str) {
    let text = expected.replace(['⟪', '⟫'], "");
    assert_eq!(String::from_utf8(marked(text.as_bytes())).unwrap(), expected);
}

#[test]
fn proofs_follow_the_mark_until_the_next_declaration() {
    check("import Mathlib\n\ntheorem a : 1 = 1 := by⟪\n  rfl\n\n⟫def b := 2\n");
    check("lemma a (n : ℕ) : n = n :=⟪ rfl\n⟫lemma b : True := by⟪ trivial\n⟫end X\n");
    check("example : 2 + 2 = 4 :=\n  by⟪ decide\n⟫@[simp] theorem c : True :=⟪ ⟨⟩⟫");
    check("theorem bytes : p :=⟪ byte⟫");
    check("theorem a : p := by⟪\r\n  simp\r\n\r\n⟫/-- About b. -/\r\ntheorem b : q :=⟪ h\r\n⟫");
    check("private theorem a : p := by⟪ simp\n\n⟫section\n  protected lemma b : q :=⟪ x.lemma\n  ⟫def c := 1\n");
    check("def f (n : Nat) : Nat := n + 1\ninstance : Foo := by infer_instance\nabbrev X := Nat\n");
    check("theorem a : p := by⟪\n  open Real in\n  set_option x true in simp\n⟫open Real\n#check a\n");
    check("theorem a : p := by⟪\nsimp\n\n-- b\ntermination_by x\n⟫grind_pattern a => b\n");
    check("theorem a : p := by⟪ exact lemma x\n  ⟫@[simp]  private lemma b : lemma = q :=⟪ x⟫");
    check("open Real in theorem a : p := by⟪ simp⟫");
    check("theorem a : p :=⟪\nbegin\n  simp,\n⟫end\n");
}

#[test]
fn marks_inside_of_brackets_and_lets_belong_to_the_statement() {
    check("theorem a (n : ℕ := 5) {m : ℕ := by exact 2} ⦃k : ℕ := 1⦄ [D := e] : f (x := n) = ⟨m⟩ := by⟪ simp⟫");
    check("theorem a : let x := 5; have y := x; x = y := by⟪ simp (config := {a := 1})\n  let z := 1\n⟫");
    check("@[simp, to_additive (attr := simp)]\ntheorem a : f '' {x | x = '('} = '\\'' := by⟪ simp\n⟫");
    check("theorem a : (match n with\n  | 0 => p) := by⟪ x⟫");
    check("theorem a : match n with\n  | 0 => p\n  | _ => q := by⟪ x⟫");
    // Brackets that are never closed end with the next declaration.
    check("def a := ((\ntheorem b : p :=⟪ q ((\n⟫theorem c : p :=⟪ q⟫");
}

#[test]
fn what_is_hidden_counts_for_nothing() {
    check("theorem a : \"x := by (\" = s := by⟪ -- theorem z : p := q\n  /- def /- lemma -/\ntheorem -/ simp⟫");
    check("theorem a : p /- := /- -/ := -/ = -- := by\n  q := by⟪ exact \"\ntheorem \\\" b\"\n⟫axiom c : p\n");
    check("theorem «a := b» : r\"\\\" = r#\"a\" := b\"# := by⟪ simp⟫");
    check("/- theorem a : p := q\n");
    check("/-! := -/ theorem a : p := by⟪ h'⟫");
}

#[test]
fn theorems_without_a_mark_are_source() {
    check("theorem a : ∀ n, p n\n  | 0 => by simp (x := 1)\n  | n + 1 => let y := 2; q\ntheorem b : p := by⟪ q⟫");
    check("theorem a : p ∧ q where\n  left := x\n  right := y\n");
    check("theorem a : |x| = |y| := by⟪ simp\n  | z⟫");
}

#[test]
fn any_bytes_are_lexed_to_their_end() {
    let text = "theorem a : 'x' \"s\" r#\"t\"# «n» ⟨1⟩ := by /- c -/ simp '\\n' \n".as_bytes();
    for cut in 0..text.len() {
        marked(&text[..cut]);
        marked(&text[cut..]);
    }
    let mut state = 1u64;
    let alphabet = b"'\"\\r#/-!:=|@[(){}\n ab\xe2\x9f\xa8\xff\xc2\xab";
    for _ in 0..300 {
        let bytes: Vec<u8> = (0..60)
            .map(|_| {
                state = crate::mix::mix(state);
                alphabet[(state % alphabet.len() as u64) as usize]
            })
            .collect();
        marked(&bytes);
    }
}
