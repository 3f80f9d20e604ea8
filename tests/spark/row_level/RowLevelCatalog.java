import java.io.*;
import java.nio.charset.StandardCharsets;
import java.nio.file.*;
import java.util.*;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.catalyst.CatalystTypeConverters;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.analysis.NoSuchTableException;
import org.apache.spark.sql.catalyst.expressions.UnsafeProjection;
import org.apache.spark.sql.catalyst.expressions.UnsafeRow;
import org.apache.spark.sql.connector.catalog.*;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.connector.read.*;
import org.apache.spark.sql.connector.write.*;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * A catalog of tables that take MERGE: what AUTO CDC asks of its targets, and no more. For tests, because neither Iceberg
 * nor Delta has a jar for Spark 4.3 here.
 *
 * A table is one group of rows: a row-level operation reads all of them and writes all that are left (copy-on-write). It
 * lies in one file of the folder `spark.sql.catalog.NAME.folder`, so that the next process finds it, and beside it, as
 * lines of JSON, for the test to read. Janino compiles this: no lambdas, raw types where generics would need bridges.
 */
public class RowLevelCatalog implements TableCatalog, SupportsNamespaces {
  private String name;
  private File folder;

  public void initialize(String name, CaseInsensitiveStringMap options) {
    this.name = name;
    this.folder = new File(options.get("folder"));
  }

  public String name() {
    return name;
  }

  private File file(Identifier ident) {
    return new File(folder, ident.name() + ".rows");
  }

  public boolean tableExists(Identifier ident) {
    return file(ident).exists();
  }

  public Table loadTable(Identifier ident) throws NoSuchTableException {
    if (!tableExists(ident)) throw new NoSuchTableException(ident);
    return new RowLevelTable(file(ident), Held.read(file(ident)));
  }

  public Table createTable(Identifier ident, Column[] columns, Transform[] partitions, Map properties) {
    Held held = new Held(CatalogV2Util.v2ColumnsToStructType(columns).json(), new HashMap(properties));
    held.write(file(ident));
    return new RowLevelTable(file(ident), held);
  }

  public Table alterTable(Identifier ident, TableChange[] changes) {
    Held held = Held.read(file(ident));
    for (int i = 0; i < changes.length; i++) {
      if (changes[i] instanceof TableChange.SetProperty) {
        TableChange.SetProperty set = (TableChange.SetProperty) changes[i];
        held.properties.put(set.property(), set.value());
      } else {
        throw new UnsupportedOperationException(changes[i].toString());
      }
    }
    held.write(file(ident));
    return new RowLevelTable(file(ident), held);
  }

  public boolean dropTable(Identifier ident) {
    return file(ident).delete();
  }

  public void renameTable(Identifier from, Identifier to) {
    throw new UnsupportedOperationException();
  }

  public Identifier[] listTables(String[] namespace) {
    return new Identifier[0];
  }

  public String[][] listNamespaces() {
    return new String[0][];
  }

  public String[][] listNamespaces(String[] namespace) {
    return new String[0][];
  }

  public boolean namespaceExists(String[] namespace) {
    return true;
  }

  public Map loadNamespaceMetadata(String[] namespace) {
    return new HashMap();
  }

  public void createNamespace(String[] namespace, Map metadata) {}

  public void alterNamespace(String[] namespace, NamespaceChange[] changes) {}

  public boolean dropNamespace(String[] namespace, boolean cascade) {
    throw new UnsupportedOperationException();
  }

  /** A table's schema, properties and rows, each an UnsafeRow's bytes. */
  static class Held implements Serializable {
    final String schema;
    final HashMap properties;
    ArrayList rows = new ArrayList();

    Held(String schema, HashMap properties) {
      this.schema = schema;
      this.properties = properties;
    }

    StructType type() {
      return (StructType) DataType.fromJson(schema);
    }

    static Held read(File file) {
      try {
        ObjectInputStream in = new ObjectInputStream(new FileInputStream(file));
        Held held = (Held) in.readObject();
        in.close();
        return held;
      } catch (Exception e) {
        throw new RuntimeException(e);
      }
    }

    void write(File file) {
      try {
        file.getParentFile().mkdirs();
        ObjectOutputStream out = new ObjectOutputStream(new FileOutputStream(file));
        out.writeObject(this);
        out.close();
        StringBuilder lines = new StringBuilder();
        scala.Function1 external = CatalystTypeConverters.createToScalaConverter(type());
        for (int i = 0; i < rows.size(); i++) {
          lines.append(((Row) external.apply(row(i))).json()).append("\n");
        }
        Path json = new File(file.getPath().replace(".rows", ".json")).toPath();
        Files.write(json, lines.toString().getBytes(StandardCharsets.UTF_8), new OpenOption[0]);
      } catch (IOException e) {
        throw new UncheckedIOException(e);
      }
    }

    UnsafeRow row(int i) {
      byte[] bytes = (byte[]) rows.get(i);
      UnsafeRow row = new UnsafeRow(type().size());
      row.pointTo(bytes, bytes.length);
      return row;
    }
  }

  static class RowLevelTable implements SupportsRead, SupportsWrite, SupportsRowLevelOperations, TruncatableTable {
    final File file;
    final Held held;

    RowLevelTable(File file, Held held) {
      this.file = file;
      this.held = held;
    }

    public String name() {
      return file.getName();
    }

    public StructType schema() {
      return held.type();
    }

    public Map properties() {
      return held.properties;
    }

    public Set capabilities() {
      return EnumSet.of(TableCapability.BATCH_READ, TableCapability.BATCH_WRITE);
    }

    public boolean truncateTable() {
      new Held(held.schema, held.properties).write(file);
      return true;
    }

    public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
      return new WholeTable(file);
    }

    public WriteBuilder newWriteBuilder(LogicalWriteInfo info) {
      return new Rewrite(file, held.schema, false);
    }

    public RowLevelOperationBuilder newRowLevelOperationBuilder(RowLevelOperationInfo info) {
      return new Operation(this, info.command());
    }
  }

  static class Operation implements RowLevelOperationBuilder, RowLevelOperation {
    final RowLevelTable table;
    final RowLevelOperation.Command command;

    Operation(RowLevelTable table, RowLevelOperation.Command command) {
      this.table = table;
      this.command = command;
    }

    public RowLevelOperation build() {
      return this;
    }

    public RowLevelOperation.Command command() {
      return command;
    }

    public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
      return new WholeTable(table.file);
    }

    public WriteBuilder newWriteBuilder(LogicalWriteInfo info) {
      return new Rewrite(table.file, table.held.schema, true);
    }
  }

  static class WholeTable implements ScanBuilder, Scan, Batch, PartitionReaderFactory, InputPartition {
    final File file;

    WholeTable(File file) {
      this.file = file;
    }

    public Scan build() {
      return this;
    }

    public StructType readSchema() {
      return Held.read(file).type();
    }

    public Batch toBatch() {
      return this;
    }

    public InputPartition[] planInputPartitions() {
      return new InputPartition[] {this};
    }

    public PartitionReaderFactory createReaderFactory() {
      return this;
    }

    public PartitionReader createReader(InputPartition partition) {
      return new Rows(Held.read(file));
    }
  }

  static class Rows implements PartitionReader {
    final Held held;
    int i = -1;

    Rows(Held held) {
      this.held = held;
    }

    public boolean next() {
      i = i + 1;
      return i < held.rows.size();
    }

    public Object get() {
      return held.row(i);
    }

    public void close() {}
  }

  /** Appends the rows, or, as the end of a row-level operation, puts them in the place of all. */
  static class Rewrite implements WriteBuilder, Write, BatchWrite, DataWriterFactory {
    final File file;
    final String schema;
    final boolean replaces;

    Rewrite(File file, String schema, boolean replaces) {
      this.file = file;
      this.schema = schema;
      this.replaces = replaces;
    }

    public Write build() {
      return this;
    }

    public BatchWrite toBatch() {
      return this;
    }

    public DataWriterFactory createBatchWriterFactory(PhysicalWriteInfo info) {
      return this;
    }

    public DataWriter createWriter(int partition, long task) {
      return new Writer((StructType) DataType.fromJson(schema));
    }

    public void commit(WriterCommitMessage[] messages) {
      Held held = Held.read(file);
      if (replaces) held.rows.clear();
      for (int i = 0; i < messages.length; i++) held.rows.addAll(((Written) messages[i]).rows);
      held.write(file);
    }

    public void abort(WriterCommitMessage[] messages) {}
  }

  static class Written implements WriterCommitMessage {
    final ArrayList rows = new ArrayList();
  }

  static class Writer implements DataWriter {
    final UnsafeProjection projection;
    final Written written = new Written();

    Writer(StructType type) {
      this.projection = UnsafeProjection.create(type);
    }

    public void write(Object row) {
      written.rows.add(projection.apply((InternalRow) row).getBytes().clone());
    }

    public WriterCommitMessage commit() {
      return written;
    }

    public void abort() {}

    public void close() {}
  }
}
